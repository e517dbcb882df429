# Tests of loading: toy libraries, real ones from PyPI, preloads. They need Windlass, and no GPU.
add_executable(ask loader/ask.c)
add_executable(ask_rpath loader/ask.c)
add_executable(ask_runpath loader/ask.c)
foreach(program ask ask_rpath ask_runpath)
  target_include_directories(${program} PRIVATE "${NCCL_INCLUDE_DIR}")
  target_include_directories(${program} SYSTEM PRIVATE "${STUBS}/include")
  target_link_libraries(${program} PRIVATE nccl_link_stub Threads::Threads ${CMAKE_DL_LIBS})
endforeach()
set(TOYS "${CMAKE_CURRENT_BINARY_DIR}/toys")
target_link_options(ask_rpath PRIVATE "LINKER:--disable-new-dtags,-rpath,${TOYS}/a")
target_link_options(ask_runpath PRIVATE "LINKER:--enable-new-dtags,-rpath,${TOYS}/a")

# Toys under NCCL's name: two that answer different versions, and two of peculiar behaviour.
function(add_toy folder version source)
  add_library(nccl_toy_${folder} SHARED loader/toys/${source})
  target_compile_definitions(nccl_toy_${folder} PRIVATE TOY_VERSION=${version})
  # Tail calls are made, and destructors inlined, only when optimising.
  target_compile_options(nccl_toy_${folder} PRIVATE -O2)
  target_include_directories(nccl_toy_${folder} PRIVATE "${NCCL_INCLUDE_DIR}")
  target_include_directories(nccl_toy_${folder} SYSTEM PRIVATE "${STUBS}/include")
  target_link_libraries(nccl_toy_${folder} PRIVATE Threads::Threads)
  set_target_properties(nccl_toy_${folder} PROPERTIES NO_SONAME ON LINK_FLAGS "-Wl,-soname,libnccl.so.2"
                        LIBRARY_OUTPUT_DIRECTORY "${TOYS}/${folder}" OUTPUT_NAME nccl SUFFIX .so.2)
endfunction()
add_toy(a 22801 nccl_toy.c)
add_toy(b 22802 nccl_toy.c)
add_toy(early 22803 early_toy.c)
add_toy(cpp 22804 cpp_toy.cpp)
# In later standards a string is freed inside libstdc++.
set_target_properties(nccl_toy_cpp PROPERTIES CXX_STANDARD 11)
add_executable(own_new loader/own_new.cpp)
target_include_directories(own_new PRIVATE "${NCCL_INCLUDE_DIR}")
target_include_directories(own_new SYSTEM PRIVATE "${STUBS}/include")
target_link_libraries(own_new PRIVATE nccl_link_stub Threads::Threads)
add_library(shim SHARED loader/toys/shim.c)
set_target_properties(shim PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${TOYS}")

add_library(calling SHARED loader/toys/calling.c)
target_include_directories(calling PRIVATE "${NCCL_INCLUDE_DIR}")
target_include_directories(calling SYSTEM PRIVATE "${STUBS}/include")
target_link_libraries(calling PRIVATE nccl_link_stub)
set_target_properties(calling PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${TOYS}")

function(add_loader_test name labels)
  add_test(NAME loader.${name} COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/loader/${name}.py")
  set(environment "CTESTS_WINDLASS_DIR=${WINDLASS_LIBRARY_DIR}" "CTESTS_BUILD_DIR=${CMAKE_CURRENT_BINARY_DIR}"
      "CTESTS_SIM_DIR=${SIM_DIR}" "CTESTS_WHEEL_DIR=${WHEEL_CACHE_DIR}" "PYTHONDONTWRITEBYTECODE=1")
  set_tests_properties(loader.${name} PROPERTIES LABELS "${labels}" TIMEOUT 300 SKIP_RETURN_CODE 77
                       ENVIRONMENT "${environment}")
endfunction()

if(WINDLASS_LIBRARY_DIR)
  foreach(name exports preload no_library search passing missing_names reentry early_calls own_new file_limit jemalloc second)
    add_loader_test(${name} "sim;quick")
  endforeach()
  if(WHEEL_CACHE_DIR)
    add_loader_test(wheels wheel)
    add_loader_test(older_headers wheel)
    # See header.fresh.
    set_tests_properties(loader.wheels loader.older_headers PROPERTIES RESOURCE_LOCK wheels)
  endif()
endif()
