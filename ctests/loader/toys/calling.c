/* A library whose constructor calls NCCL: it does so while it holds the loader's lock. */
#include <nccl.h>
#include <unistd.h>

__attribute__((constructor)) static void load(void) {
  int version = 0;
  /* Long enough that another thread has begun its own first call and waits for the loader. */
  usleep(200000);
  ncclGetVersion(&version);
}
