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

# Two toys under NCCL's name, which answer different versions.
function(add_toy folder version)
  add_library(nccl_toy_${folder} SHARED loader/toys/nccl_toy.c)
  target_compile_definitions(nccl_toy_${folder} PRIVATE TOY_VERSION=${version})
  # Tail calls are made only when optimising.
  target_compile_options(nccl_toy_${folder} PRIVATE -O2)
  target_include_directories(nccl_toy_${folder} PRIVATE "${NCCL_INCLUDE_DIR}")
  target_include_directories(nccl_toy_${folder} SYSTEM PRIVATE "${STUBS}/include")
  target_link_libraries(nccl_toy_${folder} PRIVATE Threads::Threads)
  set_target_properties(nccl_toy_${folder} PROPERTIES NO_SONAME ON LINK_FLAGS "-Wl,-soname,libnccl.so.2"
                        LIBRARY_OUTPUT_DIRECTORY "${TOYS}/${folder}" OUTPUT_NAME nccl SUFFIX .so.2)
endfunction()
add_toy(a 22801)
add_toy(b 22802)
add_library(allocator SHARED loader/toys/allocator.c)
target_compile_options(allocator PRIVATE -fno-builtin)
set_target_properties(allocator PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${TOYS}")

function(add_loader_test name label)
  add_test(NAME loader.${name} COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/loader/${name}.py")
  set(environment "CTESTS_WINDLASS_DIR=${WINDLASS_LIBRARY_DIR}" "CTESTS_BUILD_DIR=${CMAKE_CURRENT_BINARY_DIR}"
      "CTESTS_SIM_DIR=${SIM_DIR}" "CTESTS_WHEEL_DIR=${WHEEL_CACHE_DIR}" "PYTHONDONTWRITEBYTECODE=1")
  set_tests_properties(loader.${name} PROPERTIES LABELS ${label} TIMEOUT 300 SKIP_RETURN_CODE 77
                       ENVIRONMENT "${environment}")
endfunction()

if(WINDLASS_LIBRARY_DIR)
  foreach(name exports preload no_library search passing missing_names reentry jemalloc)
    add_loader_test(${name} sim)
  endforeach()
  if(WHEEL_CACHE_DIR)
    add_loader_test(wheels wheel)
    add_loader_test(older_headers wheel)
  endif()
endif()
