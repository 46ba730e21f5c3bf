/*
 * hook.c - a forward hook of PyTorch's modules that runs no Python: it reads the tensor that a
 * module returns, and hands it to strap_offer, or without the interpreter's lock to
 * strap_enqueue. Whatever is not a plain tensor in memory, it leaves to the hook in Python, its
 * twin.
 *
 * llm_instrumentation._native.hooks loads it.
 */
#include <stdlib.h>

#include "python.h"
#include "strap.h"

/* ---- what the hooks of a capture share; _native/hooks.py has the same struct ---- */

struct hooks {
  int32_t running;
  int32_t last_position; /* of several positions Python keeps the last */
  uint64_t number; /* of the capture, unique in the process and above 0 */
  uint64_t session;
  strap_status (*enqueue)(strap_session, strap_tensor *, int32_t, strap_error *);
  strap_status (*offer)(strap_session, const strap_tensor *, strap_error *);
  strap_status (*abandon)(strap_session, uint64_t, strap_error *);
  int (*view)(PyObject *tensor, DLTensor *); /* borrows; 0, or -1 with an exception */
  PyObject *plain[2];                        /* types whose elements are in their own memory */
  PyObject *tuple, *none, *no;               /* tuple, None, False */
  PyObject *is_neg;                          /* Tensor.is_neg */
  PyObject *failed;                          /* told of a tensor that was not taken */
  unsigned char *ran;                        /* 1 for each module that ran */
};

/* The hook of one module, or what puts a part of what it returns. */
struct hook {
  struct hooks *all;
  uint32_t layer; /* of the session */
  uint32_t index; /* into the calls of a thread, and into `ran` */
  PyObject *owner;     /* keeps all alive */
  PyObject *otherwise; /* the one in Python */
};

/* Where a thread stands within a step of a capture. */
struct place {
  uint64_t capture; /* 0: outside of any */
  int64_t *calls;   /* how often each layer ran; alive until the step ends. NULL: it is skipped */
  int64_t step, token;
  uint32_t request;
};

/* Few captures run at once. One that loses its place to another is left to Python. */
enum { PLACES = 4 };
static _Thread_local struct place places[PLACES];

static struct place *place_of(const struct hooks *all) { return &places[all->number % PLACES]; }

void hooks_enter(const struct hooks *all, int64_t *calls, int64_t step, int64_t token,
                 uint32_t request) {
  *place_of(all) = (struct place){all->number, calls, step, token, request};
}

void hooks_leave(const struct hooks *all) {
  struct place *here = place_of(all);
  if (here->capture == all->number) here->capture = 0;
}

/* STRAP_ type of DLPack's; 0: left to Python. Integers of 8 bits are too, for PyTorch says the
 * same of those that have fewer. */
static strap_dtype dtype_of(const DLTensor *t) {
  if (t->dtype.lanes != 1) return 0;
  switch (t->dtype.code << 8 | t->dtype.bits) {
    case DL_FLOAT << 8 | 32: return STRAP_FLOAT32;
    case DL_FLOAT << 8 | 16: return STRAP_FLOAT16;
    case DL_FLOAT << 8 | 64: return STRAP_FLOAT64;
    case DL_BFLOAT << 8 | 16: return STRAP_BFLOAT16;
    case DL_INT << 8 | 16: return STRAP_INT16;
    case DL_INT << 8 | 32: return STRAP_INT32;
    case DL_INT << 8 | 64: return STRAP_INT64;
    case DL_BOOL << 8 | 8: return STRAP_BOOL;
    default: return 0;
  }
}

static int is_plain(const struct hooks *all, PyObject *type) {
  return type == all->plain[0] || type == all->plain[1];
}

/* The two outputs of nearly all modules: a tensor, and a tensor beside None. Borrowed; NULL:
 * another one. */
static PyObject *tensor_in(const struct hooks *all, PyObject *output) {
  PyObject *type = type_of(output);
  if (is_plain(all, type)) return output;
  if (type != all->tuple || PyTuple_Size(output) != 2) return NULL;
  PyObject *first = PyTuple_GetItem(output, 0);
  if (PyTuple_GetItem(output, 1) != all->none) return NULL;
  return is_plain(all, type_of(first)) ? first : NULL;
}

/* What a tensor is. */
struct described {
  strap_tensor tensor;
  int64_t lengths[2 * STRAP_MAX_DIMS]; /* shape and strides: others may change theirs meanwhile */
};

/* Of an error Python finds the same and says why. What is none, as Ctrl-C, stays. */
static int not_described(void) {
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
  return 0;
}

/* Describes a tensor as it is in memory; 0 where that is not all there is to it. */
static int describe(const struct hooks *all, PyObject *tensor, struct described *out) {
  /* Whether it is a view that negates its elements as they are read. */
  PyObject *negative = PyObject_CallFunctionObjArgs(all->is_neg, tensor, (PyObject *)NULL);
  if (negative == NULL) return not_described();
  Py_DecRef(negative);
  if (negative != all->no) return 0;
  DLTensor d;
  if (all->view(tensor, &d) != 0) return not_described();
  strap_tensor *t = &out->tensor;
  t->dtype = dtype_of(&d);
  if (d.device.type != DL_CPU || d.data == NULL || t->dtype == 0 || d.ndim > STRAP_MAX_DIMS)
    return 0;
  if (all->last_position && d.ndim == 3 && d.shape[1] > 1) return 0;
  t->ndim = d.ndim;
  t->shape = out->lengths;
  t->strides = d.strides == NULL ? NULL : out->lengths + d.ndim;
  t->data = (char *)d.data + d.byte_offset;
  for (int i = 0; i < d.ndim; i++) {
    out->lengths[i] = d.shape[i];
    if (d.strides != NULL) out->lengths[d.ndim + i] = d.strides[i];
  }
  return 1;
}

static PyObject *nothing(const struct hooks *all) {
  Py_IncRef(all->none);
  return all->none;
}

enum { SLICE_MS = 100 }; /* of a wait, as in _native/session.py */

/* Hands a tensor over: a small one while the interpreter's lock is held, for giving it up costs
 * more than the copy. Lets Python handle signals while that waits for room. The tensor's caller
 * has a reference to it. */
static PyObject *put(const struct hook *h, strap_tensor *t) {
  const struct hooks *all = h->all;
  if (all->offer(all->session, t, NULL) == STRAP_OK) return nothing(all);
  strap_error error;
  strap_status status;
  for (;;) {
    void *thread = PyEval_SaveThread();
    status = all->enqueue(all->session, t, SLICE_MS, &error);
    PyEval_RestoreThread(thread);
    if (status != STRAP_ERR_TIMEOUT) break;
    if (PyErr_CheckSignals() != 0) {
      if (t->cursor != 0) all->abandon(all->session, t->cursor, NULL);
      return NULL;
    }
  }
  if (status >= 0) return nothing(all);
  return PyObject_CallFunction(all->failed, "ILLIiiy", t->layer, (long long)t->step,
                               (long long)t->token, t->call, status, error.sys_errno,
                               error.message);
}

/* hook(module, arguments, output) */
static PyObject *run(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "a forward hook takes a module, arguments and an output");
    return NULL;
  }
  const struct hook *h = PyCapsule_GetPointer(self, NULL);
  const struct hooks *all = h->all;
  if (!all->running) return nothing(all);
  const struct place *here = place_of(all);
  if (here->capture == all->number && here->calls == NULL) return nothing(all);
  struct described d;
  d.tensor = (strap_tensor){.struct_size = sizeof d.tensor, .layer = h->layer};
  PyObject *tensor = NULL;
  if (here->capture == all->number) tensor = tensor_in(all, arguments[2]);
  if (tensor == NULL || !describe(all, tensor, &d)) {
    if (PyErr_Occurred()) return NULL;
    return PyObject_CallFunctionObjArgs(h->otherwise, arguments[0], arguments[1], arguments[2],
                                        (PyObject *)NULL);
  }
  /* While the tensor was looked at, another thread may have ended the capture. */
  if (!all->running) return nothing(all);
  d.tensor.step = here->step;
  d.tensor.token = here->token;
  d.tensor.request = here->request;
  d.tensor.call = (uint32_t)here->calls[h->index]++;
  all->ran[h->index] = 1;
  return put(h, &d.tensor);
}

/* put(tensor, step, token, call, request) */
static PyObject *run_put(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "put takes a tensor, its step, token, call and request");
    return NULL;
  }
  const struct hook *h = PyCapsule_GetPointer(self, NULL);
  if (!h->all->running) return nothing(h->all);
  struct described d;
  d.tensor = (strap_tensor){.struct_size = sizeof d.tensor, .layer = h->layer};
  d.tensor.step = PyLong_AsLongLong(arguments[1]);
  d.tensor.token = PyLong_AsLongLong(arguments[2]);
  d.tensor.call = (uint32_t)PyLong_AsLongLong(arguments[3]);
  d.tensor.request = (uint32_t)PyLong_AsLongLong(arguments[4]);
  if (PyErr_Occurred()) return NULL;
  if (is_plain(h->all, type_of(arguments[0])) && describe(h->all, arguments[0], &d))
    return put(h, &d.tensor);
  if (PyErr_Occurred()) return NULL;
  return PyObject_CallFunctionObjArgs(h->otherwise, arguments[0], arguments[1], arguments[2],
                                      arguments[3], arguments[4], (PyObject *)NULL);
}

static PyMethodDef hook_method = {"hook", run, METH_FASTCALL, "Captures what a module returns."};
static PyMethodDef put_method = {"put", run_put, METH_FASTCALL, "Captures a part of that."};

static void drop(PyObject *capsule) {
  struct hook *h = PyCapsule_GetPointer(capsule, NULL);
  Py_DecRef(h->owner);
  Py_DecRef(h->otherwise);
  free(h);
}

static PyObject *new_function(PyMethodDef *method, struct hooks *all, uint32_t layer,
                              uint32_t index, PyObject *owner, PyObject *otherwise) {
  struct hook *h = malloc(sizeof *h);
  if (h == NULL) return PyErr_NoMemory();
  *h = (struct hook){all, layer, index, owner, otherwise};
  PyObject *self = PyCapsule_New(h, NULL, drop);
  if (self == NULL) {
    free(h);
    return NULL;
  }
  Py_IncRef(owner);
  Py_IncRef(otherwise);
  PyObject *function = PyCFunction_NewEx(method, self, NULL);
  Py_DecRef(self); /* the function's, or the end of it */
  return function;
}

PyObject *hook_new(struct hooks *all, uint32_t layer, uint32_t index, PyObject *owner,
                   PyObject *otherwise) {
  return new_function(&hook_method, all, layer, index, owner, otherwise);
}

PyObject *hook_put(struct hooks *all, uint32_t layer, PyObject *owner, PyObject *otherwise) {
  return new_function(&put_method, all, layer, 0, owner, otherwise);
}
