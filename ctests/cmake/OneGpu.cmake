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

# PROGRAM with so many RANKS, called NAME; after OPTIONS further ones for the runner, after WORDS those for the program.
function(add_one_gpu program name ranks)
  set(test "one_gpu.${program}.${name}_of_${ranks}")
  cmake_parse_arguments(PARSE_ARGV 3 run "" "" "OPTIONS;WORDS")
  add_test(NAME ${test} COMMAND ${RUN} --out "${RUNS}/${test}" --nccl "${REAL_NCCL_LIBRARY}" --gpu --windlass "${WINDLASS_LIBRARY_DIR}"
           --fabric yes --set CTESTS_RANKS=${ranks} ${run_OPTIONS} -- $<TARGET_FILE:${program}> ${run_WORDS})
  set_tests_properties(${test} PROPERTIES LABELS one_gpu TIMEOUT 300 RUN_SERIAL ON ENVIRONMENT "CTESTS_ONE_GPU=${ONE_GPU_DIR}")
endfunction()

set(fast --served fast --set WINDLASS_LAZY=all)
set(all_fast --served fast --set "WINDLASS_TUNING=${ONE_GPU_DIR}/all.tuning" --set WINDLASS_LAZY=all)
foreach(ranks 2 3 4 5 8)
  add_one_gpu(random_collectives fast ${ranks} OPTIONS ${all_fast})
  add_one_gpu(collectives fast ${ranks} OPTIONS ${all_fast})
  add_one_gpu(batches fast ${ranks} OPTIONS ${all_fast} WORDS tuned largest many full larger opposite_orders captured any)
  add_one_gpu(random_p2p mailbox ${ranks} OPTIONS --served mailbox)
  add_one_gpu(patterns mailbox ${ranks} OPTIONS --served mailbox)
endforeach()
# How many kernels it counts is for numbers of ranks whose limits were measured.
foreach(ranks 2 4)
  add_one_gpu(uneven fast ${ranks} OPTIONS ${fast})
endforeach()
