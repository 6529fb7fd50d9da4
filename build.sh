#!/usr/bin/env bash
# One entry for everything a developer does. No argument prints the verbs.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<END
usage: ./build.sh <verb>
  demo    install, then generate text with the tiny model by speculative decoding  (arguments go to specdec generate)
  test    install, then run every check: formatting, types, tests                  (arguments go to pytest)
  docs    build the site of docs/ into build/site
  dev     install editable into .venv with a persistent build directory
  wheel   build a wheel into dist/

PYTHON names the interpreter (python3), SPECDEC_CUDA_ARCHITECTURES the GPUs to build for
(this machine's, else 90a-real; a wheel: all).
END
}

fail() {
  echo "build.sh: $*" >&2
  exit 1
}

python=${PYTHON:-python3}
venv=.venv
bin=$venv/bin

# What pip cannot install, said before anything is made.
check_machine() {
  command -v "$python" >/dev/null || fail "there is no $python, expected Python 3.10 or later (PYTHON=... names another)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is $("$python" --version 2>&1), expected Python 3.10 or later (PYTHON=... names another)"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python has no venv module, which .venv is made with (on Debian and Ubuntu: apt install python3-venv)"
  [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    fail "$python has no Python.h to compile against (on Debian and Ubuntu: apt install python3-dev)"
  command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    fail "there is no C++ compiler, expected one for C++20 (on Debian and Ubuntu: apt install g++)"
}

# Every pip call takes its versions from constraints.txt, so that no new release breaks a build.
pip_install() { "$bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"; }

# Whether the files that name requirements have changed since $1 was touched.
outdated() { [ ! -e "$1" ] || [ constraints.txt -nt "$1" ] || [ pyproject.toml -nt "$1" ] || [ build.sh -nt "$1" ]; }

setup_build() {
  [ -x "$bin/python" ] || check_machine
  "$bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
  export PATH="$PWD/$bin:$PATH:/usr/local/cuda/bin"
  local stamp=$venv/.build-requirements
  if outdated "$stamp"; then
    echo "installing build requirements into $venv"
    pip_install "pip>=23.1" "scikit-build-core>=0.11" "pybind11>=3.0" "apache-tvm-ffi>=0.1.9" "cmake>=3.26" ninja
    touch "$stamp"
  fi
}

# After every other package: pip complains about the dependencies that are left out here when it installs more.
setup_cuda() {
  local stamp=$venv/.cuda-requirements
  if ! command -v nvcc >/dev/null; then
    echo "no nvcc on the PATH: building for the CPU alone"
  elif outdated "$stamp"; then
    pip_install --no-deps nvidia-cutlass # for its headers
    touch "$stamp"
  fi
}

# The GPU of this machine, so that a developer build runs on it; without one, Hopper.
architecture_here() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .) || true
  case "$capability" in
    "" | 90) echo 90a-real ;;
    *) echo "$capability-real" ;;
  esac
}

dev() {
  setup_build
  local stamp=$venv/.development-requirements
  if outdated "$stamp"; then
    echo "installing torch, transformers and the test tools"
    pip_install torch numpy "transformers>=5.17" tokenizers "safetensors>=0.5" "rich>=13" "matplotlib>=3.8" \
      "pytest>=8" "pytest-xdist>=3" "hypothesis>=6" ruff mypy clang-format
    touch "$stamp"
  fi
  setup_cuda
  echo "building specdec_kernels (minutes the first time)"
  pip_install --no-build-isolation --no-deps -e . -Cbuild-dir=build/dev \
    -Ccmake.define.CMAKE_CUDA_ARCHITECTURES="${SPECDEC_CUDA_ARCHITECTURES:-$(architecture_here)}"
}

demo() {
  dev
  "$bin/specdec" generate "$@"
}

run_tests() {
  dev
  "$bin/ruff" check .
  "$bin/ruff" format --check .
  "$bin/clang-format" --dry-run --Werror csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh
  "$bin/mypy"
  OMP_NUM_THREADS=1 "$bin/pytest" -n "${SPECDEC_TEST_WORKERS:-auto}" "$@"
}

wheel() {
  setup_build
  setup_cuda
  "$bin/python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w dist . \
    -Ccmake.define.CMAKE_CUDA_ARCHITECTURES="${SPECDEC_CUDA_ARCHITECTURES:-80-real;86-real;89-real;90a-real;100f-real;120f-real;120-virtual}"
  ls -l dist/*.whl
}

# The docstrings are read from the source: nothing is compiled.
docs() {
  setup_build
  local stamp=$venv/.site-requirements
  if outdated "$stamp"; then
    echo "installing mkdocs"
    pip_install mkdocs-material "mkdocstrings[python]" ruff # ruff sets the signatures
    touch "$stamp"
  fi
  "$bin/mkdocs" build --strict --quiet
  echo "build/site/index.html"
}

verb=${1:-}
[ $# -eq 0 ] || shift
# No `&&` behind a verb: it would switch `set -e` off inside.
case "$verb" in
  demo) demo "$@" ;;
  test) run_tests "$@" ;;
  docs) docs ;;
  dev) dev ;;
  wheel) wheel ;;
  "") usage ;;
  *) usage >&2 && exit 2 ;;
esac
