/* Holds that a program that links NCCL sets WINDLASS_NCCL too late once it runs: the real NCCL was opened when the program was
 * loaded, and there is one. */
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
