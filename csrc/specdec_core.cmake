# Two header sets that live in wheels, found through the Python that builds: nothing is vendored.
function(wheel_headers package distribution subdirectory result)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u, os; print(os.path.dirname(u.find_spec('${package}').origin), end='')"
    OUTPUT_VARIABLE root RESULT_VARIABLE failed ERROR_QUIET)
  if(failed OR NOT EXISTS ${root}/${subdirectory})
    message(FATAL_ERROR "The build needs the headers in the Python package ${distribution}, which is not installed for "
                        "${Python_EXECUTABLE} (pip install ${distribution}${ARGN})")
  endif()
  set(${result} ${root}/${subdirectory} PARENT_SCOPE)
endfunction()
wheel_headers(tvm_ffi apache-tvm-ffi include DLPACK_INCLUDE)

# CUDA's defaults, which a target takes over when it is made.
if(SPECDEC_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
endif()
if(SPECDEC_CUDA AND CMAKE_CUDA_COMPILER)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static) # the wheel asks the host for a driver only
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  wheel_headers(cutlass_library nvidia-cutlass source/include CUTLASS_INCLUDE
                ", or -DSPECDEC_CUDA=OFF for a build without CUDA kernels")
endif()

# specdec_core: every op, free of Python. With nvcc it has the CUDA halves too; without, only the CPU ones.
file(GLOB_RECURSE CORE_SOURCES CONFIGURE_DEPENDS csrc/*.cpp)
list(REMOVE_ITEM CORE_SOURCES ${PYTHON_SOURCES})
add_library(specdec_core STATIC ${CORE_SOURCES})
target_include_directories(specdec_core PUBLIC csrc)
target_include_directories(specdec_core SYSTEM PUBLIC ${DLPACK_INCLUDE})
target_link_libraries(specdec_core PUBLIC Threads::Threads)
target_compile_options(specdec_core PUBLIC $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off -ffile-prefix-map=${CMAKE_SOURCE_DIR}/=>)
# Checks of the stack, and of the C library's copies where the optimizer knows sizes; no kernel and no loop of ours calls
# one of them.
if(NOT SPECDEC_SANITIZE)
  target_compile_options(specdec_core PUBLIC $<$<COMPILE_LANGUAGE:CXX>:-fstack-protector-strong>
                                             $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3>)
else()
  target_compile_options(specdec_core PUBLIC -fsanitize=address,undefined -fno-sanitize-recover=undefined
                                             -fno-omit-frame-pointer -g)
  target_link_options(specdec_core PUBLIC -fsanitize=address,undefined)
endif()
# Its sums may be fused: they need not have the bits that another device gives. (It must not include core/exact_math.h:
# the linker keeps one copy of an inline function.)
set_source_files_properties(csrc/attention/common/tile_pass.cpp PROPERTIES COMPILE_OPTIONS -ffp-contract=fast)

if(SPECDEC_CUDA AND CMAKE_CUDA_COMPILER)
  file(GLOB_RECURSE CUDA_SOURCES CONFIGURE_DEPENDS csrc/*.cu)
  if(SPECDEC_COMPILE_CHECK)
    list(FILTER CUDA_SOURCES EXCLUDE REGEX "instantiations/.*_d(64|256)\\.cu$")
  endif()
  set_source_files_properties(${CUDA_SOURCES} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_sources(specdec_core PRIVATE ${CUDA_SOURCES})
  target_include_directories(specdec_core SYSTEM PRIVATE ${CUTLASS_INCLUDE})
  target_link_libraries(specdec_core PUBLIC CUDA::cudart_static)
  list(JOIN CMAKE_CUDA_ARCHITECTURES " " ARCHITECTURES) # with semicolons it would be several definitions
  target_compile_definitions(
    specdec_core PUBLIC SPECDEC_WITH_CUDA SPECDEC_CUDA_VERSION="${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}"
                        SPECDEC_CUDA_ARCHITECTURES="${ARCHITECTURES}")
  if(SPECDEC_COMPILE_CHECK)
    target_compile_definitions(specdec_core PUBLIC SPECDEC_COMPILE_CHECK)
    set(CODE_OPTIONS -Xptxas=-O0)
  elseif(NOT SPECDEC_SMALL)
    set(CODE_OPTIONS -lineinfo)
  elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
    set(CODE_OPTIONS -Xfatbin=-compress-all) # which every driver of CUDA 12 reads; the other from 550 on
  else()
    set(CODE_OPTIONS --compress-mode=size)
  endif()
  # nvcc splits what it hands to the host compiler at spaces: a folder with one in its name keeps its paths in messages.
  if(NOT CMAKE_SOURCE_DIR MATCHES " ")
    set(SHORT_PATHS ,-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=)
  endif()
  target_compile_options(
    specdec_core PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --extended-lambda ${CODE_OPTIONS}
                         -Xcompiler=-Wall,-ffp-contract=off${SHORT_PATHS}>)
endif()
