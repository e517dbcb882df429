# Empty libraries with the names of the real ones, to link against: so the programs build before, and without, the
# libraries that they will meet.
set(STUBS "${CMAKE_CURRENT_BINARY_DIR}/stubs")
file(STRINGS "${ROOT}/abi/exports/2.32.3.txt" NCCL_NAMES)
file(READ "${CMAKE_CURRENT_SOURCE_DIR}/support/cuda_driver.h" DRIVER_HEADER)
string(REGEX MATCHALL "cu[A-Z][A-Za-z0-9_]*\\(" DRIVER_NAMES "${DRIVER_HEADER}")

function(add_link_stub target soname)
  set(source "")
  foreach(name IN LISTS ARGN)
    string(REPLACE "(" "" name "${name}")
    string(APPEND source "void ${name}(void);\nvoid ${name}(void) {}\n")
  endforeach()
  file(GENERATE OUTPUT "${STUBS}/${target}.c" CONTENT "${source}")
  add_library(${target} SHARED "${STUBS}/${target}.c")
  target_compile_options(${target} PRIVATE -w)
  set_target_properties(${target} PROPERTIES NO_SONAME ON LINK_FLAGS "-Wl,-soname,${soname}")
endfunction()

add_link_stub(nccl_link_stub libnccl.so.2 ${NCCL_NAMES})
add_link_stub(cuda_link_stub libcuda.so.1 ${DRIVER_NAMES})

# NVIDIA's nccl.h includes CUDA's headers; ours does not need these.
execute_process(COMMAND "${Python3_EXECUTABLE}" "${ROOT}/abi/cuda_stubs.py" "${STUBS}/include"
  RESULT_VARIABLE STUBS_FAILED)
if(STUBS_FAILED)
  message(FATAL_ERROR "abi/cuda_stubs.py failed")
endif()
