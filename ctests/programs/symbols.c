/* Holds that every name of the lists given as arguments resolves to a symbol of the library that has ncclGetVersion. */
#define _GNU_SOURCE
#include "../support/harness.h"

#include <dlfcn.h>

static void* home_of(void* address) {
  Dl_info info;
  return address && dladdr(address, &info) ? info.dli_fbase : NULL;
}

static void check_list(const char* path, void* home) {
  char name[128];
  FILE* list = fopen(path, "r");
  if (!CHECK(list != NULL)) return;
  while (fscanf(list, "%127s", name) == 1) {
    void* address = dlsym(RTLD_DEFAULT, name);
    if (!CHECK(address != NULL && home_of(address) == home)) {
      fprintf(stderr, "  %s of %s %s\n", name, path, address ? "is somebody else's" : "does not resolve");
    }
  }
  fclose(list);
}

int main(int count, char** lists) {
  begin("symbols", 30);
  void* home = home_of(dlsym(RTLD_DEFAULT, "ncclGetVersion"));
  CHECK(home != NULL);
  for (int i = 1; i < count; i++) check_list(lists[i], home);
  return finish();
}
