# A driver and an NVML in front of the real ones that know no NVLink, in the folder no_nvlink of the build: rows of runs.txt for real
# GPUs name it with --cuda.
if(NOT REAL_NCCL_LIBRARY)
  return()
endif()

function(add_in_front target name definition)
  execute_process(COMMAND "${Python3_EXECUTABLE}" -c "import ctypes, sys
ctypes.CDLL(sys.argv[1])
print(next(line.split()[-1] for line in open('/proc/self/maps') if sys.argv[1].split('.')[0] + '.' in line), end='')" "${name}"
    OUTPUT_VARIABLE real ERROR_QUIET RESULT_VARIABLE is_missing)
  if(is_missing)
    message(STATUS "no ${name}: no run without NVLink")
    return()
  endif()
  add_link_stub(${target}_link_stub "${real}")
  add_library(${target} SHARED support/no_nvlink.c)
  target_compile_definitions(${target} PRIVATE "REAL=\"${real}\"" ${definition})
  target_link_libraries(${target} PRIVATE -Wl,--no-as-needed ${target}_link_stub ${CMAKE_DL_LIBS})
  set_target_properties(${target} PROPERTIES PREFIX "" OUTPUT_NAME "${name}" SUFFIX "" NO_SONAME ON LINK_FLAGS "-Wl,-soname,${name}"
                        LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/no_nvlink")
endfunction()

add_in_front(no_nvlink_driver libcuda.so.1 OF_DRIVER)
add_in_front(no_nvlink_nvml libnvidia-ml.so.1 OF_NVML)
