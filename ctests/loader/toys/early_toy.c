/* A library that looks like NCCL to a loader and calls its own public name while it is being loaded, through the PLT,
 * as NCCL 2.30.3 does to register its parameters. */
#include <nccl.h>
#include <pthread.h>
#include <unistd.h>

static pthread_t loader;
static int loaded;

/* Version 1 for the constructor. A call of another thread before the constructor has run is an error. */
ncclResult_t ncclGetVersion(int* version) {
  if (!loaded && !pthread_equal(loader, pthread_self())) return ncclInternalError;
  *version = loaded ? 22803 : 1;
  return ncclSuccess;
}

/* Time for other threads to call meanwhile. */
__attribute__((constructor)) static void load(void) {
  int version = 0;
  loader = pthread_self();
  ncclResult_t result = ncclGetVersion(&version);
  usleep(200000);
  loaded = result == ncclSuccess && version == 1;
}
