/* Holds: what a program that links NCCL sets of WINDLASS_NCCL after it was loaded comes too late: there is one NCCL. */
#include "../support/harness.h"

#include <stdlib.h>

int main(void) {
  begin("late_variable", 30);
  CHECK(setenv("WINDLASS_NCCL", "/no/such/libnccl.so.2", 1) == 0);
  int version = 0;
  NCCL(ncclGetVersion(&version));
  CHECK(version >= 21803);
  printf("version %d\n", version);
  return finish();
}
