/* A module that is loaded while the program runs, and unloaded before it ends. */
static int state[256];
static int __attribute__((noinline)) plugin_inner(int *p) { return ++*p; }
int plugin_entry(void) {
  int sum = 0;
  for (int i = 0; i < 256; i++) sum += plugin_inner(&state[i]);
  return sum;
}
