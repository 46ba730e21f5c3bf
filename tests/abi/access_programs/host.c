/* Loads the module named by its argument, calls it, and unloads it. */
#include <dlfcn.h>
#include <stdio.h>

#include "strap_access.h"

int main(int argc, char **argv) {
  void *module = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (module == NULL) {
    fprintf(stderr, "%s\n", argc > 1 ? dlerror() : "usage: host MODULE");
    return 1;
  }
  int (*entry)(void) = (int (*)(void))dlsym(module, "plugin_entry");
  int sum = entry();
  strap_access_flush(NULL); /* accesses written after dlclose would have no symbols */
  dlclose(module);
  printf("%d\n", sum);
  return 0;
}
