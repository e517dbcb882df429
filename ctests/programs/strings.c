/* Holds that the version and every error string are the real library's, under the nccl and the pnccl names, and need no GPU. */
#include "../support/harness.h"

#include <string.h>

int main(void) {
  begin("strings", 30);
  int version = 0, twin = 0;
  NCCL(ncclGetVersion(&version));
  CODE(pncclGetVersion(&twin), ncclSuccess);
  EQUAL(version, twin);
  CHECK(version >= 21803);
  printf("version %d\n", version);
  for (int code = -1; code <= ncclNumResults + 1; code++) {
    const char* text = ncclGetErrorString((ncclResult_t)code);
    CHECK(text != NULL && text[0] != 0);
    CHECK(text != NULL && strcmp(text, pncclGetErrorString((ncclResult_t)code)) == 0);
    printf("%d: %s\n", code, text ? text : "(null)");
  }
  CHECK(strcmp(ncclGetErrorString(ncclSuccess), "no error") == 0);
  CHECK(ncclGetLastError(NULL) != NULL);
  return finish();
}
