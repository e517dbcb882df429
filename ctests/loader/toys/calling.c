/* A library whose constructor calls NCCL while it holds the loader's lock. */
#include <nccl.h>
#include <unistd.h>

__attribute__((constructor)) static void load(void) {
  int version = 0;
  /* Time for another thread to begin its own first call and to wait for the loader. */
  usleep(200000);
  ncclGetVersion(&version);
}
