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

# The Rust one by cargo, where there is one: no row of runs.txt, which a machine without cargo could not build.
find_program(CARGO cargo HINTS "$ENV{HOME}/.cargo/bin")
if(CARGO)
  set(rust "${CMAKE_CURRENT_BINARY_DIR}/rust")
  set(EXAMPLE_RUST "${rust}/debug/all_gather")
  file(GLOB rust_sources CONFIGURE_DEPENDS "${ROOT}/examples/rust/Cargo.*" "${ROOT}/examples/rust/src/*.rs")
  # Under the names that the program links with.
  add_custom_command(OUTPUT "${EXAMPLE_RUST}"
    COMMAND "${CMAKE_COMMAND}" -E make_directory "${rust}/link"
    COMMAND "${CMAKE_COMMAND}" -E create_symlink $<TARGET_FILE:nccl_link_stub> "${rust}/link/libnccl.so.2"
    COMMAND "${CMAKE_COMMAND}" -E create_symlink $<TARGET_FILE:cuda_link_stub> "${rust}/link/libcuda.so.1"
    COMMAND "${CMAKE_COMMAND}" -E env "RUSTFLAGS=-L native=${rust}/link -D warnings"
            "${CARGO}" build --quiet --locked --offline --target-dir "${rust}"
    WORKING_DIRECTORY "${ROOT}/examples/rust" DEPENDS ${rust_sources} nccl_link_stub cuda_link_stub VERBATIM)
  add_custom_target(example_rust ALL DEPENDS "${EXAMPLE_RUST}")
endif()

if(WINDLASS_LIBRARY_DIR)
  add_test(NAME consumers.package COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/consumers/package.py")
  set(environment "CTESTS_WINDLASS_DIR=${WINDLASS_LIBRARY_DIR}" "CTESTS_BUILD_DIR=${CMAKE_CURRENT_BINARY_DIR}"
      "CTESTS_INCLUDE_DIR=${NCCL_INCLUDE_DIR}" "CTESTS_CUDA_STUBS=${STUBS}/include" "PYTHONDONTWRITEBYTECODE=1")
  set_tests_properties(consumers.package PROPERTIES LABELS sim TIMEOUT 120 ENVIRONMENT "${environment}")
endif()

# What the examples' heads say: their reports, and what those say that need GPUs.
if(WINDLASS_LIBRARY_DIR)
  set(environment "CTESTS_WINDLASS_DIR=${WINDLASS_LIBRARY_DIR}" "CTESTS_BUILD_DIR=${CMAKE_CURRENT_BINARY_DIR}" "CTESTS_SIM_DIR=${SIM_DIR}"
      "PYTHONDONTWRITEBYTECODE=1")
  add_test(NAME examples.scripts COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/consumers/example_scripts.py")
  set_tests_properties(examples.scripts PROPERTIES LABELS "sim;quick" TIMEOUT 60 ENVIRONMENT "${environment}")
endif()
if(WINDLASS_LIBRARY_DIR AND SIM_DIR)
  set(examples c/all_reduce.c=$<TARGET_FILE:example_c> c/windows.c=$<TARGET_FILE:example_windows> cpp/ring.cpp=$<TARGET_FILE:example_cpp>)
  if(CARGO)
    list(APPEND examples "rust/src/main.rs=${EXAMPLE_RUST}")
  endif()
  add_test(NAME examples.reports COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/consumers/example_reports.py" ${examples})
  set_tests_properties(examples.reports PROPERTIES LABELS "sim;quick" TIMEOUT 120 PROCESSORS 2 ENVIRONMENT "${environment}")
endif()
if(CARGO AND SIM_DIR)
  # On NCCL alone.
  add_test(NAME sim.example_rust.nccl COMMAND "${EXAMPLE_RUST}" --ranks 3)
  set_tests_properties(sim.example_rust.nccl PROPERTIES LABELS sim TIMEOUT 60 PROCESSORS 2 ENVIRONMENT "LD_LIBRARY_PATH=${SIM_DIR}")
endif()
