#!/usr/bin/env bash
# One entry for everything a developer does. No argument prints the verbs.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<EOF
usage: ./build.sh <verb>
  demo    install, then generate text with the tiny model by speculative decoding
  test    install, then run every check: formatting, types, tests  (arguments go to pytest)
  dev     install editable into .venv with a persistent build directory
  wheel   build a wheel into dist/
EOF
}

python=${PYTHON:-python3}
venv=.venv
bin=$venv/bin

# Every pip call takes its versions from constraints.txt: an unpinned torch brings gigabytes of CUDA libraries.
pip_install() { "$bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"; }

# The build requirements, once per change of the files that name them.
setup_build() {
  [ -x "$bin/python" ] || "$python" -m venv "$venv"
  local stamp=$venv/.build-requirements
  if [ ! -e "$stamp" ] || [ constraints.txt -nt "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ build.sh -nt "$stamp" ]; then
    echo "installing build requirements into $venv"
    pip_install "scikit-build-core>=0.11" "pybind11>=3.0" "apache-tvm-ffi>=0.1.9" "cmake>=3.26" ninja
    # CUTLASS: headers only, so without its dependencies; a CPU-only build does not need them.
    if command -v nvcc >/dev/null; then pip_install --no-deps nvidia-cutlass==4.2.0.0; fi
    touch "$stamp"
  fi
  export PATH="$PWD/$bin:$PATH"
}

dev() {
  setup_build
  local extras=$venv/.extras
  if [ ! -e "$extras" ] || [ constraints.txt -nt "$extras" ] || [ pyproject.toml -nt "$extras" ]; then
    echo "installing torch, transformers and the test tools"
    pip_install torch numpy "transformers>=5.17" "safetensors>=0.5" "rich>=13" "matplotlib>=3.8" \
      "pytest>=8" "pytest-xdist>=3" "hypothesis>=6" ruff mypy clang-format
    touch "$extras"
  fi
  pip_install --no-build-isolation --no-deps -e . -Cbuild-dir=build/dev \
    -Ccmake.define.CMAKE_CUDA_ARCHITECTURES="${SPECDEC_CUDA_ARCHITECTURES:-90a-real}"
}

run_tests() {
  dev
  "$bin/ruff" check . && "$bin/ruff" format --check .
  git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' | xargs "$bin/clang-format" --dry-run --Werror
  "$bin/mypy"
  OMP_NUM_THREADS=1 "$bin/pytest" -n "${SPECDEC_TEST_WORKERS:-auto}" "$@"
}

wheel() {
  setup_build
  "$bin/python" -m pip wheel --quiet --no-build-isolation --no-deps -w dist . \
    -Ccmake.define.CMAKE_CUDA_ARCHITECTURES="${SPECDEC_CUDA_ARCHITECTURES:-80-real;86-real;89-real;90a-real;100f-real;120f-real;120-virtual}"
  ls -l dist/*.whl
}

verb=${1:-}
[ $# -gt 0 ] && shift
case "$verb" in
  demo) dev && "$bin/specdec" generate "$@" ;;
  test) run_tests "$@" ;;
  dev) dev ;;
  wheel) wheel ;;
  "") usage ;;
  *) usage >&2 && exit 2 ;;
esac
