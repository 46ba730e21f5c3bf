/* A memory trace goes from text to tables and to a Parquet file. Bad arguments are refused. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include "arrow_abi.h"

static char text_path[1024], parquet_path[1024];

static void write_text(void) {
  FILE *f = fopen(text_path, "w");
  CHECK(f != NULL, "no file %s", text_path);
  fputs("==1== Lackey\nI  400,3\n", f);
  for (int i = 0; i < 1000; i++) fprintf(f, " S %x,8\n L %x,8\n", i * 64, i * 64);
  fputs(" L what,8\n", f);
  fclose(f);
}

static strap_trace parse(struct ArrowArrayStream *out) {
  strap_trace trace = 0;
  EXPECT(STRAP_OK, strap_trace_parse("lackey", text_path, "{\"run_id\": \"r\"}", out, &trace, &error));
  CHECK(trace != 0 && out->release != NULL, "no trace");
  return trace;
}

static int64_t rows_of(struct ArrowArrayStream *stream) {
  int64_t rows = 0;
  struct ArrowArray batch;
  for (;;) {
    CHECK(stream->get_next(stream, &batch) == 0, "%s", stream->get_last_error(stream));
    if (batch.release == NULL) break;
    rows += batch.length;
    batch.release(&batch);
  }
  stream->release(stream);
  return rows;
}

static strap_trace_counts_t counts_of(strap_trace trace) {
  strap_trace_counts_t counts = {.struct_size = sizeof counts};
  EXPECT(STRAP_OK, strap_trace_counts(trace, &counts, &error));
  return counts;
}

/* Parses, labels and analyses a trace, each step reading the stream of the step before. */
static void tables(void) {
  struct ArrowArrayStream text, labelled, table;
  strap_trace parsed = parse(&text), labels, analysis;
  EXPECT(STRAP_OK, strap_trace_label(&text,
                                     "{\"ranges\": [{\"start\": 0, \"end\": 32768,"
                                     " \"region_type\": \"weight\"}], \"policy\": \"skip\"}",
                                     &labelled, &labels, &error));
  CHECK(text.release == NULL, "the stream was not taken over");
  EXPECT(STRAP_OK, strap_trace_analyse(&labelled, "{\"workers\": 1}", &analysis, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_trace_table(analysis, "iai", &table, &error));
  strap_status status;
  while ((status = strap_trace_run(analysis, 0, &error)) == STRAP_ERR_TIMEOUT) continue;
  CHECK(status == STRAP_OK, "%s", error.message);
  EXPECT(STRAP_OK, strap_trace_run(analysis, 0, &error)); /* a finished run stays finished */

  strap_trace_counts_t counts = counts_of(parsed);
  CHECK(counts.done == 1 && counts.rows == 2000 && counts.malformed == 1, "parsed %llu, %llu bad",
        (unsigned long long)counts.rows, (unsigned long long)counts.malformed);
  counts = counts_of(labels);
  CHECK(counts.rows == 1024 && counts.skipped == 976, "labelled %llu",
        (unsigned long long)counts.rows);
  CHECK(counts_of(analysis).rows == 1024, "analysed %llu",
        (unsigned long long)counts_of(analysis).rows);

  EXPECT(STRAP_OK, strap_trace_table(analysis, "write_once", &table, &error));
  CHECK(rows_of(&table) == 1, "one region");
  EXPECT(STRAP_OK, strap_trace_table(labels, "region_map", &table, &error));
  CHECK(rows_of(&table) == 1, "one region");
  EXPECT(STRAP_OK, strap_trace_table(labels, "label_coverage", &table, &error));
  CHECK(rows_of(&table) == 2, "a type, and unknown");
  EXPECT(STRAP_OK, strap_trace_table(parsed, "malformed", &table, &error));
  CHECK(rows_of(&table) == 1, "one damaged line");
  EXPECT(STRAP_ERR_NOT_FOUND, strap_trace_table(analysis, "region_map", &table, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_trace_run(parsed, 0, &error));
  EXPECT(STRAP_OK, strap_trace_close(analysis, &error));
  EXPECT(STRAP_OK, strap_trace_close(labels, &error));
  EXPECT(STRAP_OK, strap_trace_close(parsed, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_trace_close(parsed, &error));
}

static int exists(const char *path) {
  FILE *f = fopen(path, "r");
  if (f != NULL) fclose(f);
  return f != NULL;
}

static void files(void) {
  struct ArrowArrayStream text;
  strap_trace parsed = parse(&text), file;
  EXPECT(STRAP_OK, strap_trace_write_parquet(&text, parquet_path, NULL, &file, &error));
  EXPECT(STRAP_OK, strap_trace_close(file, &error)); /* closed before it is complete */
  CHECK(!exists(parquet_path), "a file that is not whole");
  EXPECT(STRAP_OK, strap_trace_close(parsed, &error));

  parsed = parse(&text);
  EXPECT(STRAP_OK, strap_trace_close(parsed, &error)); /* the stream outlives the trace */
  EXPECT(STRAP_OK, strap_trace_write_parquet(&text, parquet_path, "{}", &file, &error));
  EXPECT(STRAP_OK, strap_trace_run(file, -1, &error));
  CHECK(counts_of(file).rows == 2000 && exists(parquet_path), "no file");
  EXPECT(STRAP_OK, strap_trace_close(file, &error));
  remove(parquet_path);
}

/* With the option `instructions`, instruction fetches become rows. */
static void instructions(void) {
  struct ArrowArrayStream text;
  strap_trace trace;
  EXPECT(STRAP_OK, strap_trace_parse("lackey", text_path, "{\"instructions\": true}", &text, &trace,
                                     &error));
  CHECK(rows_of(&text) == 2001, "not one more row");
  CHECK(counts_of(trace).skipped == 1, "skipped %llu", (unsigned long long)counts_of(trace).skipped);
  EXPECT(STRAP_OK, strap_trace_close(trace, &error));
}

/* Partial analyses of parts, and what their merge refuses. */
static void parts(void) {
  const char *half[] = {
      "{\"trace\": {\"fingerprint\": \"f\", \"rows\": 4000, \"bytes\": 1}, \"end_row\": 2000}",
      "{\"trace\": {\"fingerprint\": \"f\", \"rows\": 4000, \"bytes\": 1}, \"first_row\": 2000, "
      "\"end_row\": 4000, \"workers\": 1}"};
  struct ArrowArrayStream text, table;
  strap_trace parsed, file, merge;
  char path[2][1040], options[2200];
  for (int i = 0; i < 2; i++) {
    snprintf(path[i], sizeof path[i], "%s.%d", parquet_path, i);
    parsed = parse(&text);
    EXPECT(STRAP_OK, strap_trace_partial(&text, path[i], half[i], &file, &error));
    EXPECT(STRAP_OK, strap_trace_run(file, -1, &error));
    EXPECT(STRAP_ERR_NOT_FOUND, strap_trace_table(file, "iai", &table, &error));
    EXPECT(STRAP_OK, strap_trace_close(file, &error));
    EXPECT(STRAP_OK, strap_trace_close(parsed, &error));
  }
  snprintf(options, sizeof options, "{\"paths\": [\"%s\"]}", path[0]);
  EXPECT(STRAP_OK, strap_trace_merge(options, &merge, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_trace_run(merge, -1, &error));
  CHECK(strstr(error.message, "rows 2000 to 3999 are missing") != NULL, "%s", error.message);
  EXPECT(STRAP_OK, strap_trace_close(merge, &error));
  /* Each half has the times of the other: without their rows, they are refused. */
  snprintf(options, sizeof options, "{\"paths\": [\"%s\", \"%s\"]}", path[0], path[1]);
  EXPECT(STRAP_OK, strap_trace_merge(options, &merge, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_trace_run(merge, -1, &error));
  EXPECT(STRAP_OK, strap_trace_close(merge, &error));

  parsed = parse(&text);
  EXPECT(STRAP_OK, strap_trace_partial(
                       &text, path[0],
                       "{\"trace\": {\"fingerprint\": \"f\", \"rows\": 2000, \"bytes\": 1}, \"end_row\": 2000}",
                       &file, &error));
  EXPECT(STRAP_OK, strap_trace_run(file, -1, &error));
  EXPECT(STRAP_OK, strap_trace_close(file, &error));
  EXPECT(STRAP_OK, strap_trace_close(parsed, &error));
  snprintf(options, sizeof options, "{\"paths\": [\"%s\"], \"workers\": 1}", path[0]);
  EXPECT(STRAP_OK, strap_trace_merge(options, &merge, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_trace_table(merge, "iai", &table, &error));
  EXPECT(STRAP_OK, strap_trace_run(merge, -1, &error));
  CHECK(counts_of(merge).done == 1 && counts_of(merge).rows == 2000, "not all rows");
  EXPECT(STRAP_OK, strap_trace_table(merge, "read_freq", &table, &error));
  CHECK(rows_of(&table) > 0, "no region");
  EXPECT(STRAP_OK, strap_trace_table(merge, "support", &table, &error));
  rows_of(&table);
  EXPECT(STRAP_OK, strap_trace_close(merge, &error));
  remove(path[0]);
  remove(path[1]);

  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_trace_merge("{}", &merge, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_trace_merge("{\"tables\": []}", &merge, &error));
  parsed = parse(&text);
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_trace_partial(&text, path[0], NULL, &file, &error));
  CHECK(text.release == NULL, "a stream that is refused is given back all the same");
  EXPECT(STRAP_OK, strap_trace_close(parsed, &error));
}

static void refusals(void) {
  struct ArrowArrayStream stream, text, none;
  strap_trace trace;
  memset(&none, 0, sizeof none);
  EXPECT(STRAP_ERR_NOT_FOUND,
         strap_trace_parse("lackey", "/nowhere/at/all", NULL, &stream, &trace, &error));
  CHECK(trace == 0 && stream.release == NULL, "a trace of nothing");
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_trace_parse("pcap", text_path, NULL, &stream, &trace, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_trace_parse("lackey", text_path, "{\"run\": 1}", &stream, &trace, &error));
  CHECK(strstr(error.message, "run") != NULL, "%s", error.message);
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_trace_parse("lackey", text_path, "{} {}", &stream, &trace, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_trace_parse("lackey", text_path, "{\"workers\": 257}", &stream, &trace, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_trace_parse(NULL, text_path, NULL, &stream, &trace, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_trace_parse("lackey", text_path, NULL, NULL, &trace, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_trace_analyse(&none, NULL, &trace, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_trace_analyse(NULL, NULL, &trace, &error));

  strap_trace parsed = parse(&text);
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_trace_analyse(&text, "{\"tables\": [\"lives\"]}", &trace, &error));
  CHECK(text.release == NULL, "a stream that is refused is given back all the same");
  EXPECT(STRAP_OK, strap_trace_close(parsed, &error));
  parsed = parse(&text);
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_trace_label(&text, "{\"policy\": \"maybe\"}", &stream, &trace, &error));
  EXPECT(STRAP_OK, strap_trace_close(parsed, &error));
  parsed = parse(&text);
  EXPECT(STRAP_ERR_NOT_FOUND,
         strap_trace_write_parquet(&text, "/nowhere/at/all", NULL, &trace, &error));
  EXPECT(STRAP_OK, strap_trace_close(parsed, &error));

  EXPECT(STRAP_ERR_INVALID_STATE, strap_trace_run(12345, 0, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_trace_table(12345, "iai", &stream, &error));
  strap_trace_counts_t counts = {.struct_size = 0};
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_trace_counts(12345, &counts, &error));
}

int main(int argc, char **argv) {
  snprintf(text_path, sizeof text_path, "%s.txt", stream_path(argc, argv));
  snprintf(parquet_path, sizeof parquet_path, "%s.parquet", stream_path(argc, argv));
  write_text();
  tables();
  files();
  instructions();
  parts();
  refusals();
  remove(text_path);
  puts("traces went through");
  return 0;
}
