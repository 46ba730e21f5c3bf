/*
 * hook.c - a forward hook for PyTorch modules that runs no Python.
 *
 * The hook reads the tensor that a module returned. It passes a small tensor to strap_offer while
 * it holds the GIL. It passes any other tensor to strap_enqueue and releases the GIL meanwhile.
 * Everything that is not a plain CPU tensor goes to the hook in Python, which does the same work.
 *
 * llm_instrumentation._native.hooks loads this file.
 */
#include <stdlib.h>
#include <string.h>

#include "python.h"
#include "strap.h"

/* The state that all hooks of one capture share. _native/hooks.py declares the same struct. */

struct hooks {
  int32_t running;       /* 0: the capture has ended, and every hook returns None at once */
  int32_t last_position; /* 1: leave (batch, positions, features) to Python, which cuts it */
  uint64_t number;       /* the capture's number: above 0, unique in the process */
  uint64_t session;
  strap_status (*enqueue)(strap_session, strap_tensor *, int32_t, strap_error *);
  strap_status (*offer)(strap_session, const strap_tensor *, strap_error *);
  strap_status (*abandon)(strap_session, uint64_t, strap_error *);
  int (*view)(PyObject *tensor, DLTensor *); /* fills a borrowed view; -1 sets an exception */
  PyObject *plain[2];                        /* torch.Tensor and torch.nn.Parameter */
  PyObject *tuple, *none, *no;               /* tuple, None, False */
  PyObject *is_neg;                          /* Tensor.is_neg */
  PyObject *failed;                          /* called with the error of a refused tensor */
  unsigned char *ran;                        /* one byte per module: 1 once it has run */
};

/* A hook on a module, or on one tensor inside a module's output. */
struct hook {
  struct hooks *all;
  uint32_t layer;      /* the session's id of the tensor */
  uint32_t index;      /* the module's place in `calls` and `ran` */
  PyObject *owner;     /* a reference that keeps `all` alive */
  PyObject *otherwise; /* the hook in Python */
};

/* The step that a thread is in. */
struct place {
  uint64_t capture; /* number of the capture; 0: the thread is in no step */
  int64_t *calls;   /* how often each module ran in the step; Python owns it. NULL: no capture */
  int64_t step, token;
  uint32_t request;
};

/* Each thread remembers one step for each slot. Two captures with the same slot overwrite each
 * other; the hooks in Python then serve the one that was overwritten. */
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

/* dtype_of maps a DLPack type to a STRAP_ type. It returns 0 for types that Python handles. 8-bit
 * integers are among them: PyTorch reports types of fewer bits as 8-bit integers too. */
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

/* tensor_in returns the tensor of an output that is a tensor or a pair (tensor, None), which nearly
 * all modules return. The reference is borrowed. It returns NULL for every other output. */
static PyObject *tensor_in(const struct hooks *all, PyObject *output) {
  PyObject *type = type_of(output);
  if (is_plain(all, type)) return output;
  if (type != all->tuple || PyTuple_Size(output) != 2) return NULL;
  PyObject *first = PyTuple_GetItem(output, 0);
  if (PyTuple_GetItem(output, 1) != all->none) return NULL;
  return is_plain(all, type_of(first)) ? first : NULL;
}

/* A tensor with its own copy of shape and strides: another thread may resize the original. */
struct described {
  strap_tensor tensor;
  int64_t lengths[2 * STRAP_MAX_DIMS]; /* the shape, then the strides */
};

/* not_described clears an ordinary exception and returns 0: the Python hook runs next, meets the
 * same error and reports it. KeyboardInterrupt and SystemExit stay pending. */
static int not_described(void) {
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
  return 0;
}

/* describe fills out with the tensor's memory. It returns 0 if Python has to handle the tensor: its
 * elements are computed as they are read (negative views), lie on a device, or have an odd type; it
 * has no elements or too many dimensions; or Python cuts it (last_position). An exception may then
 * be pending: see not_described. */
static int describe(const struct hooks *all, PyObject *tensor, struct described *out) {
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

enum { SLICE_MS = 100 }; /* the longest wait between two looks for signals, as in session.py */

/* put passes a tensor to the session. For a small tensor it keeps the GIL, because to release the
 * GIL takes longer than the copy. While it waits for room it lets Python handle signals. If a
 * signal handler raises, put gives the tensor up and returns NULL. If the session refuses the
 * tensor, put returns the answer of hooks.failed. The caller holds a reference to the tensor. */
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

/* put_call puts the tensor of one more call of the hook's module in this step. */
static PyObject *put_call(const struct hook *h, struct described *d) {
  const struct hooks *all = h->all;
  const struct place *here = place_of(all);
  d->tensor.layer = h->layer;
  d->tensor.step = here->step;
  d->tensor.token = here->token;
  d->tensor.request = here->request;
  d->tensor.call = (uint32_t)here->calls[h->index]++;
  all->ran[h->index] = 1;
  return put(h, &d->tensor);
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
  d.tensor = (strap_tensor){.struct_size = sizeof d.tensor};
  PyObject *tensor = NULL;
  if (here->capture == all->number) tensor = tensor_in(all, arguments[2]);
  if (tensor == NULL || !describe(all, tensor, &d)) {
    if (PyErr_Occurred()) return NULL;
    return PyObject_CallFunctionObjArgs(h->otherwise, arguments[0], arguments[1], arguments[2],
                                        (PyObject *)NULL);
  }
  /* Another thread may have ended the capture while describe called into Python. */
  if (!all->running) return nothing(all);
  return put_call(h, &d);
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

/* What compiled code emits comes here with the number of its module. */

struct emission {
  int (*view)(PyObject *tensor, DLTensor *); /* as in struct hooks */
  PyObject *otherwise;                       /* the operator in Python */
  PyObject *none;
};

/* Who takes what a module emits. */
struct taker {
  PyObject *function;      /* of hook_new, or the hook in Python; NULL: nobody */
  const struct hook *hook; /* of hook_new; NULL: the operator in Python takes it */
};
static struct taker *takers; /* by the number of the module */
static size_t room;          /* elements of takers */

/* emission_to says who takes what a module emits. function: None: nobody. in_c: it is of hook_new.
 * It returns -1 if there is no memory. */
int emission_to(uint64_t module, PyObject *function, int in_c, const PyObject *none) {
  if (module >= room) {
    size_t more = module + module / 2 + 64;
    struct taker *grown = realloc(takers, more * sizeof *grown);
    if (grown == NULL) return -1;
    memset(grown + room, 0, (more - room) * sizeof *grown);
    takers = grown;
    room = more;
  }
  PyObject *before = takers[module].function;
  takers[module] = (struct taker){NULL, NULL};
  if (function != none) {
    Py_IncRef(function);
    takers[module].function = function;
    if (in_c) takers[module].hook = PyCapsule_GetPointer(PyCFunction_GetSelf(function), NULL);
  }
  if (before != NULL) Py_DecRef(before);
  return 0;
}

/* taker_of returns who takes what the module of `site` emits. */
static struct taker taker_of(const struct emission *e, PyObject *site) {
  DLTensor d;
  uint64_t module;
  if (e->view(site, &d) != 0 || d.device.type != DL_CPU || d.data == NULL) {
    not_described();
    return (struct taker){e->otherwise, NULL};
  }
  memcpy(&module, (char *)d.data + d.byte_offset, sizeof module);
  return module < room ? takers[module] : (struct taker){NULL, NULL};
}

/* emitted puts the tensor for its module's hook. It returns 0 if Python takes the tensor, else 1
 * and the answer. */
static int emitted(const struct hook *h, PyObject *const *arguments, PyObject **answer) {
  const struct hooks *all = h->all;
  const struct place *here = place_of(all);
  int ended = !all->running || (here->capture == all->number && here->calls == NULL);
  if (!ended) {
    PyObject *value = arguments[2];
    struct described d;
    d.tensor = (strap_tensor){.struct_size = sizeof d.tensor};
    if (here->capture != all->number || !is_plain(all, type_of(value)) ||
        PyUnicode_GetLength(arguments[3]) != 0 || PyObject_IsTrue(arguments[4]) != 1 ||
        !describe(all, value, &d))
      return 0;
    if (all->running) {
      *answer = put_call(h, &d);
      return 1;
    }
  }
  *answer = nothing(all);
  return 1;
}

/* emit(order, site, value, path, first) */
static PyObject *run_emit(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 5) {
    PyErr_SetString(PyExc_TypeError, "emit takes order, site, value, path and first");
    return NULL;
  }
  const struct emission *e = PyCapsule_GetPointer(self, NULL);
  struct taker taker = taker_of(e, arguments[1]);
  if (PyErr_Occurred()) return NULL;
  if (taker.function == NULL) {
    Py_IncRef(e->none);
    return e->none;
  }
  if (taker.hook != NULL) {
    PyObject *answer = NULL;
    Py_IncRef(taker.function); /* the capture may end meanwhile */
    int done = emitted(taker.hook, arguments, &answer);
    Py_DecRef(taker.function);
    if (done) return answer;
    if (PyErr_Occurred()) return NULL;
  }
  return PyObject_CallFunctionObjArgs(e->otherwise, arguments[0], arguments[1], arguments[2],
                                      arguments[3], arguments[4], (PyObject *)NULL);
}

static PyMethodDef emit_method = {"emit", run_emit, METH_FASTCALL,
                                  "Captures a tensor of compiled code."};
static PyMethodDef hook_method = {"hook", run, METH_FASTCALL, "Captures the output of a module."};
static PyMethodDef put_method = {"put", run_put, METH_FASTCALL, "Captures one tensor."};

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
  Py_DecRef(self); /* the function keeps its own reference; if there is no function, drop runs */
  return function;
}

PyObject *hook_new(struct hooks *all, uint32_t layer, uint32_t index, PyObject *owner,
                   PyObject *otherwise) {
  return new_function(&hook_method, all, layer, index, owner, otherwise);
}

PyObject *hook_put(struct hooks *all, uint32_t layer, PyObject *owner, PyObject *otherwise) {
  return new_function(&put_method, all, layer, 0, owner, otherwise);
}

/* emission_new returns the operator. It is never freed: the operator lives as long as the process. */
PyObject *emission_new(int (*view)(PyObject *, DLTensor *), PyObject *otherwise, PyObject *none) {
  struct emission *e = malloc(sizeof *e);
  if (e == NULL) return PyErr_NoMemory();
  *e = (struct emission){view, otherwise, none};
  PyObject *self = PyCapsule_New(e, NULL, NULL);
  if (self == NULL) {
    free(e);
    return NULL;
  }
  Py_IncRef(otherwise);
  PyObject *function = PyCFunction_NewEx(&emit_method, self, NULL);
  Py_DecRef(self);
  return function;
}
