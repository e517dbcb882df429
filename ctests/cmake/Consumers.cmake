# The examples, which run by rows of runs.txt, and a project that finds Windlass by its CMake package.
add_executable(example_c "${ROOT}/examples/c/all_reduce.c")
add_executable(example_windows "${ROOT}/examples/c/windows.c")
target_link_libraries(example_windows PRIVATE Threads::Threads)
add_executable(example_cpp "${ROOT}/examples/cpp/ring.cpp")
foreach(example example_c example_windows example_cpp)
  target_include_directories(${example} PRIVATE "${NCCL_INCLUDE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}/consumers/include")
  target_include_directories(${example} SYSTEM PRIVATE "${STUBS}/include")
  target_link_libraries(${example} PRIVATE nccl_link_stub cuda_link_stub)
endforeach()
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
