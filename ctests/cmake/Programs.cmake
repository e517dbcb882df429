# The harness of the C programs, what they are given, and those that no row of runs.txt fits.
add_library(harness STATIC support/harness.c support/reference.c support/collective.c support/one_thread.c
            support/messages.c support/values.c support/calls.c support/team.c support/held.c support/memory.c support/gathers.c
            support/uneven.c support/fused.c support/windows.c support/tuning.c)
target_include_directories(harness PUBLIC "${NCCL_INCLUDE_DIR}")
target_include_directories(harness SYSTEM PUBLIC "${STUBS}/include")
find_package(Threads REQUIRED)
target_link_libraries(harness PUBLIC nccl_link_stub cuda_link_stub Threads::Threads ${CMAKE_DL_LIBS} m)

set(RUNS "${CMAKE_CURRENT_BINARY_DIR}/runs")

# A tuning table of GPUs of these kinds by which all sizes are native, whatever the ranks: so every kernel runs.
function(write_tuning path)
  set(table "windlass-tuning 1\n# not measured\n")
  foreach(ranks RANGE 2 8)
    foreach(collective all_reduce broadcast reduce all_gather reduce_scatter uneven_all_gather uneven_reduce_scatter
            other_all_reduce other_reduce other_reduce_scatter)
      foreach(kind IN LISTS ARGN)
        foreach(multicast no yes)
          string(APPEND table "${collective} ranks ${ranks} gpu ${kind} multicast ${multicast} native_bytes_max 256M\n")
        endforeach()
      endforeach()
    endforeach()
  endforeach()
  file(WRITE "${path}" "${table}")
endfunction()

# Where all sizes are native, so that every wire is used. And of devices of so many multiprocessors.
write_tuning("${CMAKE_CURRENT_BINARY_DIR}/all.tuning" 9.0/32 8.0/32)
write_tuning("${CMAKE_CURRENT_BINARY_DIR}/grids.tuning" 9.0/132 9.0/108 9.0/78)
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/nccl.conf" "# As an administrator writes it.\nNCCL_P2P_DISABLE=1\n")

# NCCL's variables, by a runner of their own.
add_executable(environment programs/environment.c)
target_link_libraries(environment PRIVATE harness)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.environments COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/environments.py"
           --out "${RUNS}/sim.environments" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}"
           $<TARGET_FILE:environment>)
  set_tests_properties(sim.environments PROPERTIES LABELS sim TIMEOUT 600 PROCESSORS 2)
endif()

# Profiler plugins, one of each version of the interface.
foreach(version RANGE 4 7)
  add_library(nccl-profiler-ctests${version} SHARED support/profiler_plugin.c)
  target_compile_definitions(nccl-profiler-ctests${version} PRIVATE VERSION=${version} PROFILER_SYMBOL=ncclProfiler_v${version})
  target_link_libraries(nccl-profiler-ctests${version} PRIVATE Threads::Threads)
endforeach()

# A tool's library for NVTX.
add_library(nvtx-ctests SHARED support/nvtx_injection.c)
target_link_libraries(nvtx-ctests PRIVATE Threads::Threads)

# Processes that lack descriptors, memory or threads: one call of Windlass's after the other fails.
if(SIM_DIR AND WINDLASS_LIBRARY_DIR AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  add_executable(scarce programs/scarce.c)
  target_link_libraries(scarce PRIVATE harness)
  add_library(lacking SHARED support/scarce.c)
  target_link_libraries(lacking PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  add_test(NAME sim.scarce COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/run.py" --out "${RUNS}/sim.scarce" --nccl "${SIM_DIR}/libnccl.so.2" --cuda "${SIM_DIR}"
           --windlass "${WINDLASS_LIBRARY_DIR}" --peers "yes?" --set WINDLASS_SIM_STRICT=0
           --set LD_PRELOAD=$<TARGET_FILE:lacking> -- $<TARGET_FILE:scarce> all 4 9)
  set_tests_properties(sim.scarce PROPERTIES LABELS sim TIMEOUT 300 PROCESSORS 2 SKIP_RETURN_CODE 77)
endif()

# Collectives that came with NCCL 2.31, which the simulator is given.
add_executable(configured_calls programs/configured_calls.c)
target_link_libraries(configured_calls PRIVATE harness)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.configured_calls.peers COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/newer_nccl.py"
           "${CMAKE_C_COMPILER}" "${NCCL_INCLUDE_DIR}:${STUBS}/include" "${SIM_DIR}/libnccl.so.2" "${RUNS}/sim.configured_calls.peers"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --peers yes --unbuilt --set WINDLASS_COLLECTIVES=off -- $<TARGET_FILE:configured_calls>)
  # In fixed order native collectives run them.
  add_test(NAME sim.configured_calls.in_order COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/newer_nccl.py"
           "${CMAKE_C_COMPILER}" "${NCCL_INCLUDE_DIR}:${STUBS}/include" "${SIM_DIR}/libnccl.so.2" "${RUNS}/sim.configured_calls.in_order"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --peers yes --served native --unordered 0 --set WINDLASS_ORDER=strict
           -- $<TARGET_FILE:configured_calls>)
  set_tests_properties(sim.configured_calls.peers sim.configured_calls.in_order PROPERTIES LABELS "sim;quick" TIMEOUT 120 PROCESSORS 2)
endif()

# One-sided calls came with NCCL 2.29.2.
add_executable(one_sided programs/one_sided.c)
target_link_libraries(one_sided PRIVATE harness)
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.one_sided.peers COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/newer_nccl.py"
           "${CMAKE_C_COMPILER}" "${NCCL_INCLUDE_DIR}:${STUBS}/include" "${SIM_DIR}/libnccl.so.2" "${RUNS}/sim.one_sided.peers"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --peers yes --served native -- $<TARGET_FILE:one_sided>)
  set_tests_properties(sim.one_sided.peers PROPERTIES LABELS "sim;quick" TIMEOUT 120 PROCESSORS 2)
endif()

# NCCL's own suspend came with 2.29.7. The program itself has rows in runs.txt.
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.sleep.nccls_part COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/newer_nccl.py"
           "${CMAKE_C_COMPILER}" "${NCCL_INCLUDE_DIR}:${STUBS}/include" "${SIM_DIR}/libnccl.so.2" "${RUNS}/sim.sleep.nccls_part"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --peers yes --set CTESTS_NCCL_SUSPENDS=1
           -- "${CMAKE_CURRENT_BINARY_DIR}/sleep" processes codes graphs_stay_valid groups)
  set_tests_properties(sim.sleep.nccls_part PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()

# NCCL's CUDA runtime in a library of its own, which can be asked for the device.
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.no_context.runtime COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/newer_nccl.py"
           "${CMAKE_C_COMPILER}" "${NCCL_INCLUDE_DIR}:${STUBS}/include" "${SIM_DIR}/libnccl.so.2" "${RUNS}/sim.no_context.runtime"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --peers yes --served native -- $<TARGET_FILE:no_context> runtime)
  set_tests_properties(sim.no_context.runtime PROPERTIES LABELS "sim;quick" TIMEOUT 120 PROCESSORS 2)
endif()

# What the driver says of addresses, and who waits for whom in it: on GPUs alone, without NCCL.
add_executable(buffer_ids programs/buffer_ids.c support/driver_answers.c support/imported_memory.c)
target_link_libraries(buffer_ids PRIVATE ${CMAKE_DL_LIBS})
add_executable(driver_beside programs/driver_beside.c support/driver_answers.c support/imported_memory.c)
target_link_libraries(driver_beside PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
add_executable(driver_beside_two programs/driver_beside_two.c support/driver_answers.c support/imported_memory.c)
target_link_libraries(driver_beside_two PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
if(SIM_DIR)
  add_test(NAME sim.driver_beside_two COMMAND driver_beside_two)
  set_tests_properties(sim.driver_beside_two PROPERTIES LABELS sim TIMEOUT 60 PROCESSORS 2 ENVIRONMENT "LD_LIBRARY_PATH=${SIM_DIR}")
endif()
if(REAL_NCCL_LIBRARY)
  add_test(NAME gpu.driver_beside_two COMMAND driver_beside_two)
  set_tests_properties(gpu.driver_beside_two PROPERTIES LABELS gpu TIMEOUT 60 RUN_SERIAL ON SKIP_RETURN_CODE 77)
  add_test(NAME gpu.driver_beside COMMAND driver_beside)
  set_tests_properties(gpu.driver_beside PROPERTIES LABELS gpu TIMEOUT 60 RUN_SERIAL ON SKIP_RETURN_CODE 77)
  add_test(NAME gpu.buffer_ids COMMAND buffer_ids)
  set_tests_properties(gpu.buffer_ids PROPERTIES LABELS gpu TIMEOUT 150 RUN_SERIAL ON SKIP_RETURN_CODE 77)
endif()

# The harness and the runner fail where they must.
add_executable(harness_proof programs/harness_proof.c)
target_link_libraries(harness_proof PRIVATE harness)
if(SIM_DIR)
  add_test(NAME sim.proof COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/proof.py" "${SIM_DIR}"
           $<TARGET_FILE:harness_proof> $<TARGET_FILE:premulsum> "${RUNS}/proof")
  set_tests_properties(sim.proof PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()
