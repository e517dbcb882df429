# Our nccl.h against the tables of NVIDIA's, and those tables against a wheel.
add_test(NAME header.tables COMMAND "${Python3_EXECUTABLE}" "${ROOT}/abi/compare.py" "${NCCL_INCLUDE_DIR}/nccl.h")
set_tests_properties(header.tables PROPERTIES LABELS "header;quick" TIMEOUT 120)

if(WHEEL_CACHE_DIR)
  add_test(NAME header.fresh COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/support/fresh_tables.py"
           "${WHEEL_CACHE_DIR}" 2.28.9)
  # Both fetch wheels into one folder, as loaders' tests do.
  set_tests_properties(header.fresh PROPERTIES LABELS wheel TIMEOUT 300 RESOURCE_LOCK wheels)
endif()

# Ours compile alone, without any CUDA header; NVIDIA's do not.
get_filename_component(INCLUDED "${NCCL_INCLUDE_DIR}" REALPATH)
if(INCLUDED STREQUAL "${ROOT}/include")
  foreach(header nccl windlass)
    foreach(language "c;c99;${CMAKE_C_COMPILER}" "c++;c++17;${CMAKE_CXX_COMPILER}")
      list(GET language 0 kind)
      list(GET language 1 standard)
      list(GET language 2 compiler)
      add_test(NAME header.${header}.${standard} COMMAND "${compiler}" -x ${kind} -std=${standard} -pedantic -Wall
               -Wextra -Werror -fsyntax-only "${NCCL_INCLUDE_DIR}/${header}.h")
      set_tests_properties(header.${header}.${standard} PROPERTIES LABELS "header;quick" TIMEOUT 30)
    endforeach()
  endforeach()
endif()
