# Installs the library, its headers, the CMake package and windlass.pc for pkg-config:
#
#   cargo build --release
#   cmake -DPREFIX=/opt/windlass -P cmake/install.cmake
#
# -DLIBRARY=FILE and -DINCLUDE_DIR=DIR name other sources than target/release/libwindlass.so and include/.
cmake_minimum_required(VERSION 3.18)
get_filename_component(ROOT "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT PREFIX)
  message(FATAL_ERROR "say where to: cmake -DPREFIX=DIR -P cmake/install.cmake")
endif()
if(NOT LIBRARY)
  set(LIBRARY "${ROOT}/target/release/libwindlass.so")
endif()
if(NOT INCLUDE_DIR)
  set(INCLUDE_DIR "${ROOT}/include")
endif()
if(NOT EXISTS "${LIBRARY}")
  message(FATAL_ERROR "${LIBRARY} is missing: run cargo build --release")
endif()

file(STRINGS "${ROOT}/Cargo.toml" VERSION REGEX "^version = \"")
list(GET VERSION 0 VERSION)
string(REGEX REPLACE ".*\"([0-9.]+).*" "\\1" VERSION "${VERSION}")

# A library in use is replaced as a whole, never written over: a process that has it mapped would crash.
set(FOLDER "${PREFIX}/lib/windlass")
file(MAKE_DIRECTORY "${FOLDER}")
get_filename_component(LIBRARY "${LIBRARY}" REALPATH)
execute_process(COMMAND "${CMAKE_COMMAND}" -E copy "${LIBRARY}" "${FOLDER}/libwindlass.so.new" RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "cannot write ${FOLDER}")
endif()
file(RENAME "${FOLDER}/libwindlass.so.new" "${FOLDER}/libwindlass.so")
file(CREATE_LINK libwindlass.so "${FOLDER}/libnccl.so.2" SYMBOLIC)
# The name that a linker looks for at -lnccl.
file(CREATE_LINK libnccl.so.2 "${FOLDER}/libnccl.so" SYMBOLIC)

file(GLOB HEADERS "${INCLUDE_DIR}/nccl.h" "${INCLUDE_DIR}/windlass.h")
file(COPY ${HEADERS} DESTINATION "${PREFIX}/include/windlass")
file(COPY "${CMAKE_CURRENT_LIST_DIR}/WindlassConfig.cmake" DESTINATION "${PREFIX}/lib/cmake/Windlass")
configure_file("${CMAKE_CURRENT_LIST_DIR}/WindlassConfigVersion.cmake.in"
               "${PREFIX}/lib/cmake/Windlass/WindlassConfigVersion.cmake" @ONLY)
configure_file("${CMAKE_CURRENT_LIST_DIR}/windlass.pc.in" "${PREFIX}/lib/pkgconfig/windlass.pc" @ONLY)
message(STATUS "Windlass ${VERSION} is installed in ${PREFIX}")
