# The examples, and a project that finds Windlass by its CMake package.
add_executable(example_c "${ROOT}/examples/c/all_reduce.c")
add_executable(example_windows "${ROOT}/examples/c/windows.c")
target_link_libraries(example_windows PRIVATE Threads::Threads)
add_executable(example_cpp "${ROOT}/examples/cpp/ring.cpp")
foreach(example example_c example_windows example_cpp)
  target_include_directories(${example} PRIVATE "${NCCL_INCLUDE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}/consumers/include")
  target_include_directories(${example} SYSTEM PRIVATE "${STUBS}/include")
  target_link_libraries(${example} PRIVATE nccl_link_stub cuda_link_stub)
  if(SIM_DIR)
    add_run(${example} sim plain 60)
    if(WINDLASS_LIBRARY_DIR)
      add_run(${example} sim windlass 60)
    endif()
  endif()
endforeach()
# One that has windows, where they are kept.
if(SIM_DIR AND WINDLASS_LIBRARY_DIR)
  add_test(NAME sim.example_windows.keeping COMMAND ${RUN} --out "${RUNS}/sim.example_windows.keeping" --nccl "${SIM_DIR}/libnccl.so.2"
           --cuda "${SIM_DIR}" --windlass "${WINDLASS_LIBRARY_DIR}" --fabric yes --set WINDLASS_WINDOWS=keep --set WINDLASS_POOL=2G
           --set WINDLASS_FAST=off -- $<TARGET_FILE:example_windows>)
  set_tests_properties(sim.example_windows.keeping PROPERTIES LABELS sim TIMEOUT 120 PROCESSORS 2)
endif()
add_test(NAME examples.python COMMAND "${Python3_EXECUTABLE}" -c
         "import ast,sys; [ast.parse(open(name).read()) for name in sys.argv[1:]]"
         "${ROOT}/examples/python/ddp.py" "${ROOT}/examples/python/mem_pool.py")
set_tests_properties(examples.python PROPERTIES LABELS sim TIMEOUT 20)

if(WINDLASS_LIBRARY_DIR)
  add_test(NAME consumers.package COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/consumers/package.py")
  set(environment "CTESTS_WINDLASS_DIR=${WINDLASS_LIBRARY_DIR}" "CTESTS_BUILD_DIR=${CMAKE_CURRENT_BINARY_DIR}"
      "CTESTS_INCLUDE_DIR=${NCCL_INCLUDE_DIR}" "CTESTS_CUDA_STUBS=${STUBS}/include" "PYTHONDONTWRITEBYTECODE=1")
  set_tests_properties(consumers.package PROPERTIES LABELS sim TIMEOUT 120 ENVIRONMENT "${environment}")
endif()
