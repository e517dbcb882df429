# Two to eight ranks on one GPU (label one_gpu): the driver, the compiled kernels and NCCL are real, the links are not. Wants an
# NCCL that lets ranks share a GPU, 2.30.7 or later, in REAL_NCCL_LIBRARY. Ranks are processes, whose kernels take turns on the
# GPU. The tests of label gpu run there too, where CTESTS_ONE_GPU names the folder of the driver in front.
set(ONE_GPU "" CACHE FILEPATH "the driver's libcuda.so.1, for ranks that share one GPU; empty: no test of label one_gpu")
set(ONE_GPU_KIND "9.0/132" CACHE STRING "compute capability and multiprocessors of that GPU")
if(NOT ONE_GPU OR NOT REAL_NCCL_LIBRARY OR NOT WINDLASS_LIBRARY_DIR)
  return()
endif()

# What the driver in front needs is told apart from it by its path, as both have one soname.
get_filename_component(DRIVER "${ONE_GPU}" REALPATH)
add_link_stub(driver_link_stub "${DRIVER}")
add_library(one_gpu SHARED support/one_gpu.c)
target_compile_definitions(one_gpu PRIVATE "REAL_DRIVER=\"${DRIVER}\"")
target_link_libraries(one_gpu PRIVATE -Wl,--no-as-needed driver_link_stub ${CMAKE_DL_LIBS})
set(ONE_GPU_DIR "${CMAKE_CURRENT_BINARY_DIR}/one_gpu")
set_target_properties(one_gpu PROPERTIES OUTPUT_NAME cuda SUFFIX ".so.1" NO_SONAME ON LIBRARY_OUTPUT_DIRECTORY "${ONE_GPU_DIR}"
                      LINK_FLAGS "-Wl,-soname,libcuda.so.1")

write_tuning("${ONE_GPU_DIR}/all.tuning" ${ONE_GPU_KIND})
