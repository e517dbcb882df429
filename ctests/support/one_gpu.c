/* A libcuda.so.1 in front of the driver's that shows one GPU as eight, so that ranks in processes can meet on a machine with one
 * GPU, with the real driver and the compiled kernels. A process uses the first device; ONE_GPU_ORDINAL says which of the eight that
 * is, and the others follow it, as the peers'. Windlass and the test programs look up names in this library. NCCL and the CUDA
 * runtime call the driver's own cuGetProcAddress, and see one GPU: NCCL, from 2.30.7 on, then needs NCCL_MULTI_RANK_GPU_ENABLE=1.
 *
 * Kernels of processes take turns on the GPU, so times say nothing. All other functions are the driver's, which this library
 * needs (DT_NEEDED) under the path REAL_DRIVER. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

enum { DEVICES = 8, INVALID_VALUE = 1, INVALID_DEVICE = 101 };

static int is_known(int device) { return device >= 0 && device < DEVICES; }

/* The number of a device among the eight, the same in all processes. */
static unsigned identity(int device) {
  const char* own = getenv("ONE_GPU_ORDINAL");
  return ((own ? (unsigned)atoi(own) : 0) + (unsigned)device) % DEVICES;
}

int cuDeviceGetCount(int* count) {
  if (!count) return INVALID_VALUE;
  *count = DEVICES;
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  if (!device) return INVALID_VALUE;
  if (!is_known(ordinal)) return INVALID_DEVICE;
  *device = ordinal;
  return 0;
}

int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  int (*function)(unsigned char*, int) = NULL;
  if (!is_known(device)) return INVALID_DEVICE;
  void* driver = dlopen(REAL_DRIVER, RTLD_NOW | RTLD_LOCAL);
  if (driver) function = (int (*)(unsigned char*, int))dlsym(driver, __func__);
  if (!function) {
    fprintf(stderr, "one_gpu: no %s in " REAL_DRIVER "\n", __func__);
    abort();
  }
  int code = function(uuid, 0);
  uuid[15] ^= (unsigned char)identity(device);
  return code;
}

int cuDeviceGetPCIBusId(char* text, int bytes, int device) {
  if (!is_known(device)) return INVALID_DEVICE;
  snprintf(text, (size_t)bytes, "0000:%02x:00.0", 0xe0 + identity(device));
  return 0;
}

int cuDeviceGetP2PAttribute(int* value, int attribute, int from, int to) {
  enum { PERFORMANCE_RANK = 1 };
  if (!is_known(from) || !is_known(to) || from == to) return INVALID_DEVICE;
  *value = attribute != PERFORMANCE_RANK;
  return 0;
}
