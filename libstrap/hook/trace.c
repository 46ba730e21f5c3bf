/*
 * trace.c - the torch tracer's hot path, which runs no Python. It runs the operators that PyTorch
 * passes to a dispatch mode, and appends a row for each tensor that an operator reads or writes.
 *
 * llm_instrumentation._native.operators loads this file and owns all memory. The recorder in Python
 * (mrm/collector/torch/recorder.py) does the same work and writes the same rows. It takes the
 * operators and tensors that this file does not handle.
 *
 * Functions that return an int return 0, or -1 with an exception. Those named is_... and those whose
 * comment says otherwise differ.
 */
#ifndef __APPLE__
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#endif
#include <time.h>

#include "python.h"

PyObject *PyObject_Call(PyObject *callable, PyObject *arguments, PyObject *keywords);
PyObject *PyObject_GetAttr(PyObject *, PyObject *name);
Py_ssize_t PyObject_Size(PyObject *);
PyObject *PySequence_GetItem(PyObject *, Py_ssize_t);
void *PyLong_AsVoidPtr(PyObject *);
unsigned long long PyLong_AsUnsignedLongLong(PyObject *);

/* A row of the trace. mrm/collector/torch/spool.py declares the same. */
struct row {
  int64_t time;
  uint64_t address;
  int64_t length, word, code;
};

/* The ways to run an operator. _native/operators.py declares the same, and the next two structs. */
enum form {
  VIEW,                /* reads and writes no memory */
  MOVES,               /* reads and writes the tensors at its positions */
  MOVES_IF_CONTIGUOUS, /* as MOVES if its first argument is contiguous, else Python runs it */
  MOVES_IF_COPIED,     /* as MOVES, but no rows if its result is a view of its first argument */
  IN_PYTHON,           /* Python runs it */
};
enum { MOST = 8 }; /* the most positions of each kind */

/* An operator that the tracer knows. */
struct site {
  PyObject *func; /* the OpOverload, the key of the operator */
  PyObject *op;   /* runs the operator without rows. None: record the operators that it calls */
  PyObject *run;  /* run(args, kwargs), the handler in Python; None for a view */
  int64_t load, store; /* codes of the rows */
  int32_t form;
  int32_t reads, writes, results; /* the numbers of positions below */
  int32_t read[MOST], written[MOST], result[MOST];
  int32_t several; /* the operator returns a tuple of results */
};

/* A storage that the tracer has met, in a cache of the latest ones. */
struct met {
  uintptr_t storage; /* the address of the storage object; 0: the slot is empty */
  int64_t word;      /* for the rows; it names the storage's region */
  int64_t is_weight; /* 1: see_parameter made the storage a weight */
};

enum { ROWS = 1 << 13, SITES = 1 << 10, STORAGES = 1 << 12 };

/* The recorder of a thread. */
struct tracer {
  /* Set by Python. */
  int (*view)(PyObject *tensor, DLTensor *); /* fills a borrowed view; -1 sets an exception */
  const int64_t *forgotten;     /* changes before addresses of storages may be used again */
  PyObject *plain, *parameter;  /* the types Tensor and Parameter */
  PyObject *tuple, *list, *integer, *real; /* types */
  PyObject *none, *no_keywords; /* None, {} */
  PyObject *untyped_storage;    /* Tensor.untyped_storage */
  PyObject *cdata;              /* "_cdata" */
  PyObject *meet;               /* meet(tensor) returns the word of its storage */
  PyObject *see_parameter;      /* see_parameter(tensor) returns if its storage is a weight now */
  PyObject *note;               /* note(value, time, code) appends rows for any value */
  PyObject *dispatch;           /* dispatch(func, types, args, kwargs) */
  PyObject *gap;                /* gap() returns how many operators to skip before the next row */
  PyObject *full;               /* full(block, rows) takes the rows of a block */
  int64_t samples, sampling;    /* samples: there is a gap; sampling: operators are skipped now */
  struct site *sites[SITES];    /* a hash table by slot_of; NULL ends a chain */
  /* Set here. */
  struct tracer *next;
  PyObject *mode;      /* the dispatch mode, which owns the tracer */
  const void *thread;  /* the address of `here` in the tracer's thread */
  int64_t passing;     /* how many operators are still skipped */
  int64_t known;       /* the value of `forgotten` for the storages in `met` */
  int64_t block, at;   /* the place of the next row */
  struct met met[STORAGES];
  struct row rows[2][ROWS];
};

static _Thread_local char here; /* its address tells threads apart */

/* The tracers that are alive, the latest first. The caller holds the GIL. PyTorch wants the
 * functions of a mode to be bound to the mode, so tracer_of finds a tracer by its mode. */
static struct tracer *tracers;

/* tracer_of returns the tracer of a mode. It returns NULL with an exception if it has ended. */
static struct tracer *tracer_of(PyObject *mode) {
  struct tracer *t = tracers;
  while (t != NULL && t->mode != mode) t = t->next;
  if (t == NULL) PyErr_SetString(PyExc_TypeError, "the recorder of this dispatch mode has ended");
  return t;
}

static int64_t clock_ns(void) {
#ifdef __APPLE__
  return (int64_t)clock_gettime_nsec_np(CLOCK_UPTIME_RAW);
#else
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
#endif
}

static size_t slot_of(const void *pointer, size_t slots) {
  return ((uintptr_t)pointer * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (slots - 1);
}

/* done drops the result of a call. It returns -1 if the call failed. */
static int done(PyObject *result) {
  if (result == NULL) return -1;
  Py_DecRef(result);
  return 0;
}

/* tracer_flush passes the rows of the current block to Python. Python may run a finaliser meanwhile
 * whose operators append rows; these go to the other block. */
int tracer_flush(struct tracer *t) {
  long long block = t->block, rows = t->at;
  t->block = 1 - t->block;
  t->at = 0;
  return done(PyObject_CallFunction(t->full, "LL", block, rows));
}

static int put(struct tracer *t, struct row row) {
  while (t->at == ROWS) /* a finaliser may have filled the other block */
    if (tracer_flush(t) != 0) return -1;
  t->rows[t->block][t->at++] = row;
  return 0;
}

/* meet returns the cache's entry of a tensor's storage, and asks Python to meet a new storage. It
 * returns NULL with an exception. */
static struct met *meet(struct tracer *t, PyObject *tensor) {
  PyObject *storage = PyObject_CallFunctionObjArgs(t->untyped_storage, tensor, (PyObject *)NULL);
  if (storage == NULL) return NULL;
  PyObject *cdata = PyObject_GetAttr(storage, t->cdata);
  Py_DecRef(storage);
  if (cdata == NULL) return NULL;
  uintptr_t pointer = (uintptr_t)PyLong_AsVoidPtr(cdata);
  Py_DecRef(cdata);
  struct met *met = &t->met[slot_of((void *)pointer, STORAGES)];
  if (t->known != *t->forgotten) { /* new storages may have the addresses of the cached ones */
    for (int i = 0; i < STORAGES; i++) t->met[i].storage = 0;
    t->known = *t->forgotten;
  }
  if (met->storage == pointer) return met;
  PyObject *word = PyObject_CallFunctionObjArgs(t->meet, tensor, (PyObject *)NULL);
  if (word == NULL) return NULL;
  *met = (struct met){pointer, PyLong_AsLongLong(word), 0};
  Py_DecRef(word);
  if (met->word < 0) met->storage = 0; /* no memory, so its address may be used again at any time */
  return met;
}

static int64_t bytes_of(const DLTensor *d) {
  int64_t bytes = d->dtype.bits * d->dtype.lanes / 8;
  for (int i = 0; i < d->ndim; i++) bytes *= d->shape[i];
  return bytes;
}

static int is_contiguous(const DLTensor *d) {
  int64_t step = 1;
  if (d->strides == NULL || bytes_of(d) == 0) return 1;
  for (int i = d->ndim - 1; i >= 0; i--) {
    if (d->shape[i] != 1 && d->strides[i] != step) return 0;
    step *= d->shape[i];
  }
  return 1;
}

static uint64_t address_of(const DLTensor *d) { return (uintptr_t)d->data + d->byte_offset; }

/* describe fills d with a tensor in host memory and returns 1. It returns 0 if Python has to handle
 * the tensor; KeyboardInterrupt or SystemExit may then be pending. */
static int describe(const struct tracer *t, PyObject *tensor, DLTensor *d) {
  PyObject *type = type_of(tensor);
  if (type != t->plain && type != t->parameter) return 0;
  if (t->view(tensor, d) == 0) return d->device.type == DL_CPU && d->dtype.bits % 8 == 0;
  if (PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
  return 0;
}

/* note_in_python lets Python append the rows of a value, unless an exception is pending. */
static int note_in_python(struct tracer *t, PyObject *value, int64_t now, int64_t code) {
  if (PyErr_Occurred()) return -1;
  return done(PyObject_CallFunction(t->note, "OLL", value, (long long)now, (long long)code));
}

/* see_parameter makes the storage of a parameter a weight, if it is not one yet. Offloading may load
 * a parameter for one call only. met is the storage's entry, or NULL if meet failed. */
static int see_parameter(struct tracer *t, PyObject *parameter, struct met *met) {
  if (met == NULL) return -1;
  if (met->is_weight) return 0;
  struct met before = *met;
  PyObject *seen = PyObject_CallFunctionObjArgs(t->see_parameter, parameter, (PyObject *)NULL);
  if (seen == NULL) return -1;
  if (met->word == before.word) met->is_weight = PyLong_AsLongLong(seen);
  Py_DecRef(seen);
  return 0;
}

/* note appends the row of an operator that reads or writes a whole tensor. */
static int note(struct tracer *t, PyObject *tensor, int64_t now, int64_t code) {
  DLTensor d;
  if (!describe(t, tensor, &d) || !is_contiguous(&d)) return note_in_python(t, tensor, now, code);
  /* d points into the tensor, so use it before other code can run and change the tensor. */
  struct row row = {now, address_of(&d), bytes_of(&d), 0, code};
  struct met *met = meet(t, tensor);
  if (met == NULL) return -1;
  row.word = met->word;
  if (type_of(tensor) == t->parameter && see_parameter(t, tensor, met) != 0) return -1;
  return put(t, row);
}

/* note_value appends the rows of an argument or a result. It may be a tensor, a tuple or list of
 * tensors, or None or a number, which have no rows. */
static int note_value(struct tracer *t, PyObject *value, int64_t now, int64_t code) {
  PyObject *type = type_of(value);
  if (type == t->plain || type == t->parameter) return note(t, value, now, code);
  if (value == t->none || type == t->integer || type == t->real) return 0;
  if (type != t->tuple && type != t->list) return note_in_python(t, value, now, code);
  Py_ssize_t count = PyObject_Size(value);
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *one = PySequence_GetItem(value, i);
    if (one == NULL) return -1;
    int failed = one == t->none ? 0 : note(t, one, now, code);
    Py_DecRef(one);
    if (failed) return -1;
  }
  return 0;
}

static int note_arguments(struct tracer *t, PyObject *arguments, const int32_t *positions,
                          int32_t count, int64_t now, int64_t code) {
  for (int32_t i = 0; i < count; i++) {
    if (positions[i] >= PyTuple_Size(arguments)) continue;
    if (note_value(t, PyTuple_GetItem(arguments, positions[i]), now, code) != 0) return -1;
  }
  return 0;
}

static int note_results(struct tracer *t, const struct site *s, PyObject *out, int64_t now) {
  for (int32_t i = 0; i < s->results; i++) {
    PyObject *result = s->several ? PyTuple_GetItem(out, s->result[i]) : out;
    if (result == NULL || note_value(t, result, now, s->store) != 0) return -1;
  }
  return 0;
}

/* run runs an operator and appends the rows of the tensors at its positions. If the operator's form
 * does not allow that, it calls the handler in Python. It returns the operator's result. */
static PyObject *run(struct tracer *t, const struct site *s, PyObject *arguments,
                     PyObject *keywords) {
  DLTensor given, got;
  if (s->form != MOVES) {
    if (PyTuple_Size(arguments) == 0 || !describe(t, PyTuple_GetItem(arguments, 0), &given) ||
        (s->form == MOVES_IF_CONTIGUOUS && !is_contiguous(&given))) {
      if (PyErr_Occurred()) return NULL;
      return PyObject_CallFunctionObjArgs(s->run, arguments, keywords, (PyObject *)NULL);
    }
  }
  uint64_t from = s->form == MOVES_IF_COPIED ? address_of(&given) : 0;
  int64_t now = clock_ns();
  PyObject *out = PyObject_Call(s->op, arguments, keywords);
  if (out == NULL) return NULL;
  if (s->form == MOVES_IF_COPIED &&
      (out == PyTuple_GetItem(arguments, 0) ||
       (describe(t, out, &got) && address_of(&got) == from)))
    return out;
  if (!PyErr_Occurred() &&
      note_arguments(t, arguments, s->read, s->reads, now, s->load) == 0 &&
      note_arguments(t, arguments, s->written, s->writes, now, s->store) == 0 &&
      note_results(t, s, out, now) == 0)
    return out;
  Py_DecRef(out);
  return NULL;
}

/* run_view runs a view, which has no rows. A parameter's storage becomes a weight by it. */
static PyObject *run_view(struct tracer *t, const struct site *s, PyObject *arguments,
                          PyObject *keywords) {
  PyObject *first = PyTuple_Size(arguments) > 0 ? PyTuple_GetItem(arguments, 0) : NULL;
  if (first != NULL && type_of(first) == t->parameter) {
    DLTensor d;
    struct met unknown = {0, 0, 0};
    struct met *met = describe(t, first, &d) ? meet(t, first) : &unknown;
    if (PyErr_Occurred() || see_parameter(t, first, met) != 0) return NULL;
  }
  return PyObject_Call(s->op, arguments, keywords);
}

/* passes returns 1 if sampling skips this operator, 0 if not, and -1 with an exception. */
static int passes(struct tracer *t, const struct site *s) {
  if (!t->samples || !t->sampling || s->op == t->none) return 0;
  if (t->passing > 0) {
    t->passing--;
    return 1;
  }
  PyObject *gap = PyObject_CallFunctionObjArgs(t->gap, (PyObject *)NULL);
  if (gap == NULL) return -1;
  t->passing = PyLong_AsLongLong(gap);
  Py_DecRef(gap);
  return 0;
}

/* site_of returns the site of an operator, or NULL if the tracer does not know it. */
static const struct site *site_of(const struct tracer *t, const PyObject *func) {
  size_t slot = slot_of(func, SITES);
  while (t->sites[slot] != NULL && t->sites[slot]->func != func) slot = (slot + 1) % SITES;
  return t->sites[slot];
}

/* is_of_subclasses returns whether an operator has tensors of a subclass, which may define
 * __torch_dispatch__. PyTorch's C++ code may list Tensor itself among the types. */
static int is_of_subclasses(const struct tracer *t, PyObject *types) {
  Py_ssize_t count = PyTuple_Size(types);
  for (Py_ssize_t i = 0; i < count; i++) {
    const PyObject *type = PyTuple_GetItem(types, i);
    if (type != t->plain && type != t->parameter) return 1;
  }
  return 0;
}

/* __torch_dispatch__(func, types, args, kwargs) */
static PyObject *dispatch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count != 3 && count != 4) {
    PyErr_SetString(PyExc_TypeError, "__torch_dispatch__ takes func, types, args and kwargs");
    return NULL;
  }
  struct tracer *t = tracer_of(self);
  if (t == NULL) return NULL;
  PyObject *func = given[0], *types = given[1], *arguments = given[2];
  PyObject *keywords = count == 4 ? given[3] : t->no_keywords;
  const struct site *s = site_of(t, func);
  /* Autograd also uses the mode in its own threads. */
  if (s == NULL || is_of_subclasses(t, types) || t->thread != &here)
    return PyObject_CallFunctionObjArgs(t->dispatch, func, types, arguments, keywords,
                                        (PyObject *)NULL);
  if (s->form == VIEW) return run_view(t, s, arguments, keywords);
  int pass = passes(t, s);
  if (pass < 0) return NULL;
  if (pass) return PyObject_Call(s->op, arguments, keywords);
  if (s->form != IN_PYTHON) return run(t, s, arguments, keywords);
  return PyObject_CallFunctionObjArgs(s->run, arguments, keywords, (PyObject *)NULL);
}

/* put(time, address, length, word, code) */
static PyObject *run_put(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "put takes a time, address, length, word and code");
    return NULL;
  }
  struct tracer *t = tracer_of(self);
  if (t == NULL) return NULL;
  struct row row = {PyLong_AsLongLong(given[0]), PyLong_AsUnsignedLongLong(given[1]),
                    PyLong_AsLongLong(given[2]), PyLong_AsLongLong(given[3]),
                    PyLong_AsLongLong(given[4])};
  if (PyErr_Occurred() || put(t, row) != 0) return NULL;
  Py_IncRef(t->none);
  return t->none;
}

static PyMethodDef dispatch_method = {"__torch_dispatch__", dispatch, METH_FASTCALL,
                                      "Runs an operator and records what it moves."};
static PyMethodDef put_method = {"put", run_put, METH_FASTCALL, "Appends a row."};

/* tracer_learn adds an operator. The caller keeps the site alive, and leaves at least one of the
 * SITES slots empty. */
void tracer_learn(struct tracer *t, struct site *site) {
  size_t slot = slot_of(site->func, SITES);
  while (t->sites[slot] != NULL) slot = (slot + 1) % SITES;
  t->sites[slot] = site;
}

/* tracer_begin makes t the tracer of a dispatch mode, for the calling thread. */
void tracer_begin(struct tracer *t, PyObject *mode) {
  t->mode = mode;
  t->thread = &here;
  t->next = tracers;
  tracers = t;
}

/* tracer_end removes t from the tracers. Its functions then raise a TypeError. */
void tracer_end(struct tracer *t) {
  struct tracer **link = &tracers;
  while (*link != NULL && *link != t) link = &(*link)->next;
  if (*link != NULL) *link = t->next;
}

/* tracer_dispatch and tracer_put return new functions of the mode's tracer. */
PyObject *tracer_dispatch(PyObject *mode) { return PyCFunction_NewEx(&dispatch_method, mode, NULL); }

PyObject *tracer_put(PyObject *mode) { return PyCFunction_NewEx(&put_method, mode, NULL); }
