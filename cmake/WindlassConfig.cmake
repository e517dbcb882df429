# find_package(Windlass) defines the imported target Windlass::nccl: NCCL's interface, answered by Windlass.
#
# Laid out by install.cmake: PREFIX/lib/cmake/Windlass (this file), PREFIX/lib/windlass/libnccl.so.2,
# PREFIX/include/windlass/nccl.h. The library has folders of its own, so that installing it replaces no NCCL.
# Links are followed first: where /lib is a link to /usr/lib, the prefix is /usr, which alone has the headers.
get_filename_component(WINDLASS_PREFIX "${CMAKE_CURRENT_LIST_DIR}" REALPATH)
get_filename_component(WINDLASS_PREFIX "${WINDLASS_PREFIX}/../../.." ABSOLUTE)
set(WINDLASS_LIBRARY "${WINDLASS_PREFIX}/lib/windlass/libnccl.so.2")
include("${CMAKE_CURRENT_LIST_DIR}/WindlassLink.cmake" OPTIONAL)
set(WINDLASS_INCLUDE_DIR "${WINDLASS_PREFIX}/include/windlass")

foreach(file "${WINDLASS_LIBRARY}" "${WINDLASS_INCLUDE_DIR}/nccl.h")
  if(NOT EXISTS "${file}")
    set(Windlass_FOUND FALSE)
    set(Windlass_NOT_FOUND_MESSAGE "${file} is missing: install Windlass again")
    return()
  endif()
endforeach()

if(NOT TARGET Windlass::nccl)
  add_library(Windlass::nccl SHARED IMPORTED)
  set_target_properties(Windlass::nccl PROPERTIES
    IMPORTED_LOCATION "${WINDLASS_LIBRARY}"
    IMPORTED_SONAME libnccl.so.2
    INTERFACE_INCLUDE_DIRECTORIES "${WINDLASS_INCLUDE_DIR}")
endif()
