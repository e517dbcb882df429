/* A libcuda.so.1 and a libnvidia-ml.so.1 (OF_NVML) in front of the machine's that know no NVLink: for programs that try, on GPUs with
 * NVLink, what a machine without does. Windlass looks up names in the driver's. NCCL asks this NVML, too, and leaves NVLink alone.
 * All other functions are those of the library REAL, which this one needs (DT_NEEDED) by its path. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef OF_NVML
int nvmlDeviceGetNvLinkState(void* device, unsigned link, unsigned* state) {
  (void)device, (void)link;
  *state = 0;
  return 0;
}

int nvmlDeviceGetP2PStatus(void* from, void* to, int which, int* status) {
  enum { NVLINK = 2, NOT_SUPPORTED = 5 };
#else
int cuDeviceGetP2PAttribute(int* status, int which, int from, int to) {
  enum { NVLINK = 3, NOT_SUPPORTED = 0 }; /* native atomics, which PCIe lacks */
#endif
  void* real = dlopen(REAL, RTLD_NOW | RTLD_LOCAL);
  void* function = real ? dlsym(real, __func__) : NULL;
  if (!function) {
    fprintf(stderr, "no_nvlink: no %s in " REAL "\n", __func__);
    abort();
  }
#ifdef OF_NVML
  int code = ((int (*)(void*, void*, int, int*))function)(from, to, which, status);
#else
  int code = ((int (*)(int*, int, int, int))function)(status, which, from, to);
#endif
  if (!code && which == NVLINK) *status = NOT_SUPPORTED;
  return code;
}
