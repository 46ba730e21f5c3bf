/*
 * python.h - declarations of the parts of CPython and DLPack that hook.so uses.
 *
 * All functions of CPython here are in its stable ABI. So one hook.so serves every version from
 * 3.10 on, and building it needs no headers of Python:
 * https://docs.python.org/3/c-api/stable.html. Tensors are read through DLPack's exchange API:
 * https://dmlc.github.io/dlpack/latest/c_api.html.
 */
#ifndef HOOK_PYTHON_H
#define HOOK_PYTHON_H

#include <stddef.h>
#include <stdint.h>

/* ---- CPython ---- */

typedef struct _object PyObject;
typedef ptrdiff_t Py_ssize_t;
typedef struct {
  const char *name;
  PyObject *(*call)(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
  int flags;
  const char *doc;
} PyMethodDef;
#define METH_FASTCALL 0x0080

PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *self, PyObject *module);
PyObject *PyCFunction_GetSelf(PyObject *);
PyObject *PyCapsule_New(void *, const char *name, void (*destructor)(PyObject *));
void *PyCapsule_GetPointer(PyObject *, const char *name);
PyObject *PyObject_Type(PyObject *);
PyObject *PyObject_CallFunctionObjArgs(PyObject *callable, ...);
PyObject *PyObject_CallFunction(PyObject *callable, const char *format, ...);
int PyObject_IsTrue(PyObject *);
Py_ssize_t PyTuple_Size(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
Py_ssize_t PyUnicode_GetLength(PyObject *);
PyObject *PyErr_NoMemory(void);
void PyErr_SetString(PyObject *type, const char *message);
extern PyObject *PyExc_TypeError, *PyExc_Exception;
PyObject *PyErr_Occurred(void);
long long PyLong_AsLongLong(PyObject *);
int PyErr_ExceptionMatches(PyObject *type);
void PyErr_Clear(void);
int PyErr_CheckSignals(void);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);
void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);

/* ---- DLPack ---- */

enum { DL_CPU = 1 };
enum { DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };

typedef struct {
  void *data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides; /* strides in elements; NULL: contiguous */
  uint64_t byte_offset;
} DLTensor;

/* type_of returns the type of a value. The reference is borrowed and valid while the value lives. */
static inline PyObject *type_of(PyObject *value) {
  PyObject *type = PyObject_Type(value);
  Py_DecRef(type);
  return type;
}

#endif
