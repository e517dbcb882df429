/* Asks NCCL for its version. */
#include <nccl.h>
#include <stdio.h>

int main(void) {
  int version = 0;
  ncclResult_t answer = ncclGetVersion(&version);
  printf("%d %d\n", (int)answer, version);
  return answer == ncclSuccess ? 0 : 1;
}
