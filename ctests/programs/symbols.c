/* Holds: every name of the lists given as arguments resolves, and to the library that answers ncclGetVersion; names of
 * the first list are excused. */
#define _GNU_SOURCE
#include "../support/harness.h"

#include <dlfcn.h>
#include <string.h>

static void* home_of(void* address) {
  Dl_info info;
  return address && dladdr(address, &info) ? info.dli_fbase : NULL;
}

enum { EXCUSED_MAX = 16 };
static char excused[EXCUSED_MAX][128];

static void read_excused(const char* path) {
  char line[128];
  int used = 0;
  FILE* list = fopen(path, "r");
  if (!CHECK(list != NULL)) return;
  while (used < EXCUSED_MAX && fgets(line, sizeof line, list)) {
    line[strcspn(line, "\n")] = 0;
    if (line[0] && line[0] != '#') strcpy(excused[used++], line);
  }
  fclose(list);
}

static bool is_excused(const char* name) {
  for (int i = 0; i < EXCUSED_MAX; i++) {
    if (!strcmp(excused[i], name)) return true;
  }
  return false;
}

static void check_list(const char* path, void* home) {
  char name[128];
  FILE* list = fopen(path, "r");
  if (!CHECK(list != NULL)) return;
  while (fscanf(list, "%127s", name) == 1) {
    if (is_excused(name)) continue;
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
  if (count > 1) read_excused(lists[1]);
  for (int i = 2; i < count; i++) check_list(lists[i], home);
  return finish();
}
