/* The version numbers and the layout of every struct stay as they are. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <ctype.h>

/* A moved field breaks programs built against an older header. New fields may only be added at the
 * end of a struct that has struct_size. */
#define AT(type, field, offset) \
  _Static_assert(offsetof(type, field) == (offset), #type "." #field " has moved")

AT(strap_error, code, 0);
AT(strap_error, sys_errno, 4);
AT(strap_error, message, 8);
_Static_assert(sizeof(strap_error) == 1024, "strap_error has no struct_size to grow by");

AT(strap_open_options, codec, 4);
AT(strap_open_options, level, 8);
AT(strap_open_options, workers, 12);
AT(strap_open_options, max_memory_bytes, 16);
AT(strap_open_options, on_full, 24);
AT(strap_open_options, mode, 28);
AT(strap_open_options, resume_offset, 32);
AT(strap_open_options, keep_float32, 40);
AT(strap_open_options, rank, 44);
AT(strap_open_options, error_bound, 48);
AT(strap_open_options, workers_yield, 56);
AT(strap_open_options, burst_bytes, 64);
AT(strap_open_options, team, 72);
AT(strap_open_options, capture_id, 80);
AT(strap_open_options, ring, 88);
AT(strap_open_options, ring_steps, 92);
AT(strap_open_options, ring_seconds, 96);
AT(strap_open_options, ring_file, 104);

AT(strap_tensor, layer, 4);
AT(strap_tensor, dtype, 8);
AT(strap_tensor, ndim, 12);
AT(strap_tensor, shape, 16);
AT(strap_tensor, strides, 24);
AT(strap_tensor, data, 32);
AT(strap_tensor, step, 40);
AT(strap_tensor, token, 48);
AT(strap_tensor, call, 56);
AT(strap_tensor, request, 60);
AT(strap_tensor, transform, 64);
AT(strap_tensor, parameters, 72);
AT(strap_tensor, cursor, 80);
AT(strap_tensor, conversion, 88);

AT(strap_conversion, source, 4);
AT(strap_conversion, values, 8);
AT(strap_conversion, square_error, 16);
AT(strap_conversion, square_sum, 24);
AT(strap_conversion, max_error, 32);

AT(strap_stats_t, workers, 4);
AT(strap_stats_t, packets, 8);
AT(strap_stats_t, stalls, 80);
AT(strap_stats_t, memory_limit, 128);
AT(strap_stats_t, converted, 144);
AT(strap_stats_t, square_error, 152);
AT(strap_stats_t, max_error, 168);
AT(strap_stats_t, failure, 176);
AT(strap_stats_t, writer_thread, 180);
AT(strap_stats_t, yield_ns, 184);
AT(strap_stats_t, repeated, 192);
AT(strap_stats_t, underflowed, 200);

AT(strap_reader_options, flags, 4);

AT(strap_reader_info, indexed, 4);
AT(strap_reader_info, rows, 8);
AT(strap_reader_info, scanned, 40);
AT(strap_reader_info, problem, 48);

AT(strap_packet, dtype, 4);
AT(strap_packet, codec, 12);
AT(strap_packet, row, 16);
AT(strap_packet, step, 56);
AT(strap_packet, call, 72);
AT(strap_packet, ndim, 84);
AT(strap_packet, shape, 88);
AT(strap_packet, name_bytes, 600);
AT(strap_packet, present, 608);

AT(strap_trace_counts_t, done, 4);
AT(strap_trace_counts_t, rows, 8);
AT(strap_trace_counts_t, skipped, 16);
AT(strap_trace_counts_t, malformed, 24);
AT(strap_trace_counts_t, bytes, 32);
AT(strap_trace_counts_t, total_bytes, 40);
AT(strap_trace_counts_t, unaddressed, 48);
AT(strap_trace_counts_t, renumbered, 56);

int main(void) {
  CHECK(strap_abi_version() == STRAP_ABI_VERSION, "the library speaks %d, the header %d",
        strap_abi_version(), STRAP_ABI_VERSION);

  const char *version = strap_version();
  int dots = 0;
  CHECK(version != NULL && isdigit((unsigned char)version[0]), "version \"%s\"", version);
  for (const char *c = version; *c != 0; c++) {
    if (*c == '.') dots++;
    else CHECK(isdigit((unsigned char)*c), "version \"%s\"", version);
  }
  CHECK(dots == 2, "version \"%s\" is not MAJOR.MINOR.PATCH", version);
  CHECK(strap_version() == version, "the version is not one static string");
  printf("libstrap %s, interface %d\n", version, strap_abi_version());
  return 0;
}
