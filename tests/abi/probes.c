/* Probes refuse bad arguments. On a machine that can run them, a probe starts, gives snapshots and
 * stops. */
#include "check.h"

#define INVALID STRAP_ERR_INVALID_ARGUMENT

int main(void) {
  strap_probe probe = 7;
  size_t needed = 7;
  char text[1 << 16], again[1 << 16];

  EXPECT(INVALID, strap_probe_start(NULL, NULL, &probe, &error));
  EXPECT(INVALID, strap_probe_start("block", NULL, NULL, &error));
  EXPECT(INVALID, strap_probe_start("network", NULL, &probe, &error));
  CHECK(strstr(error.message, "\"network\"") != NULL, "%s", error.message);
  CHECK(probe == 0, "a handle of no collector");
  EXPECT(INVALID, strap_probe_start("block", "{\"device\": []}", &probe, &error));
  CHECK(strstr(error.message, "device") != NULL, "%s", error.message);
  EXPECT(INVALID, strap_probe_start("block", "{\"requests\": 5}", &probe, &error));
  EXPECT(INVALID, strap_probe_start("block", "[]", &probe, &error));
  EXPECT(INVALID, strap_probe_start("system", "{\"requests\": 64}", &probe, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_probe_read(7, text, sizeof text, &needed, &error));
  CHECK(needed == 0, "%zu bytes of no collector", needed);
  EXPECT(STRAP_ERR_INVALID_STATE, strap_probe_stop(0, &error));

  strap_status status = strap_probe_start("block", NULL, &probe, &error);
  if (status == STRAP_ERR_PERMISSION || status == STRAP_ERR_UNSUPPORTED) {
    CHECK(error.message[0] != 0, "no reason");
    printf("not here: %s\n", error.message);
    return 0;
  }
  CHECK(status == STRAP_OK, "%s", error.message);
  EXPECT(INVALID, strap_probe_read(probe, NULL, 10, &needed, &error));
  EXPECT(INVALID, strap_probe_read(probe, NULL, 0, &needed, &error));
  CHECK(needed > 2 && needed <= sizeof text, "%zu bytes", needed);
  size_t first = needed;
  EXPECT(INVALID, strap_probe_read(probe, text, first - 1, &needed, &error));
  EXPECT(STRAP_OK, strap_probe_read(probe, text, first, &needed, &error));
  CHECK(needed == first && strlen(text) == first - 1, "%zu bytes of %zu", strlen(text), first);
  CHECK(text[0] == '{' && text[first - 2] == '}' && strchr(text, '\n') == NULL, "%s", text);
  EXPECT(STRAP_OK, strap_probe_read(probe, again, sizeof again, NULL, &error));
  CHECK(strcmp(text, again) != 0, "the same snapshot a second time");
  EXPECT(STRAP_OK, strap_probe_stop(probe, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_probe_read(probe, text, sizeof text, &needed, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_probe_stop(probe, &error));
  puts(again);
  return 0;
}
