/* kernel.h - CRC-32C by carry-less multiplication. */
#ifndef STRAPCRC_H
#define STRAPCRC_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

/* Returns whether this processor and system can run strapcrc_update. */
int strapcrc_runs(void);

/* Continues the CRC-32C crc with n bytes, n at least 256. */
uint32_t strapcrc_update(uint32_t crc, const uint8_t *data, size_t n);

#pragma GCC visibility pop

#endif
