/* Device memory by its origin: see memory.h. */
#define _GNU_SOURCE
#include "memory.h"

#include <dlfcn.h>

static CUdeviceptr address_of(const char* at) { return (CUdeviceptr)(uintptr_t)at; }

static CUmemAllocationProp properties_on(CUdevice device) {
  return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                               .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                               .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
}

static size_t mappable(CUdevice device, size_t bytes) {
  CUmemAllocationProp properties = properties_on(device);
  size_t granule = 0;
  CUDA(cuMemGetAllocationGranularity(&granule, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  return (bytes + granule - 1) / granule * granule;
}

char* addresses_reserve(const struct rank* self, size_t bytes) {
  CUdeviceptr at = 0;
  CUDA(cuMemAddressReserve(&at, mappable(self->device, bytes), 0, 0, 0));
  return (char*)(uintptr_t)at;
}

void addresses_free(const struct rank* self, char* at, size_t bytes) {
  CUDA(cuMemAddressFree(address_of(at), mappable(self->device, bytes)));
}

void memory_map(const struct rank* self, char* at, size_t bytes) {
  CUmemAllocationProp properties = properties_on(self->device);
  CUmemGenericAllocationHandle handle = 0;
  CUmemAccessDesc access[RANKS_MAX];
  size_t devices = 0, whole = mappable(self->device, bytes);
  for (int device = 0; device < self->ranks; device++) {
    if (self->kind == PROCESSES && device != self->device) continue;
    access[devices++] = (CUmemAccessDesc){{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  }
  CUDA(cuMemCreate(&handle, whole, &properties, 0));
  CUDA(cuMemMap(address_of(at), whole, 0, handle, 0));
  CUDA(cuMemSetAccess(address_of(at), whole, access, devices));
  CUDA(cuMemRelease(handle)); /* the mapping keeps the memory */
}

void memory_unmap(const struct rank* self, char* at, size_t bytes) {
  CUDA(cuMemUnmap(address_of(at), mappable(self->device, bytes)));
}

struct memory memory_alloc(const struct rank* self, enum origin origin, size_t bytes) {
  struct memory memory = {NULL, bytes, origin};
  void* pointer = NULL;
  switch (origin) {
    case PLAIN: memory.at = device_alloc(bytes); break;
    case NCCLS:
      NCCL(ncclMemAlloc(&pointer, bytes));
      memory.at = pointer;
      break;
    default:
      memory.at = addresses_reserve(self, bytes);
      memory_map(self, memory.at, bytes);
  }
  return memory;
}

void memory_free(const struct rank* self, const struct memory* memory) {
  switch (memory->origin) {
    case PLAIN: device_free(memory->at); break;
    case NCCLS: NCCL(ncclMemFree(memory->at)); break;
    default:
      memory_unmap(self, memory->at, memory->bytes);
      addresses_free(self, memory->at, memory->bytes);
  }
}

void memory_return(void) {
  ncclResult_t (*trim)(void);
  *(void**)&trim = dlsym(RTLD_DEFAULT, "windlassTrim");
  if (trim && trim() != ncclSuccess) CHECK(!"windlassTrim");
}

size_t memory_used(void) {
  size_t free_bytes = 0, total_bytes = 0;
  CUDA(cuMemGetInfo_v2(&free_bytes, &total_bytes));
  return total_bytes - free_bytes;
}
