/* A plain step in native code, and control words with real acquire and release.

The Python code is the reference, line for line:

    Words                 control words             a memoryview
    Parts, send_plain     the trainer's requests    recovery/hot_path.py
    Hot, collect_plain    the trainer's answers     wire/codecs.py, recovery/hot_path.py
    Step                  a worker's step           worker/stepper.py
    serve                 a worker's loop           worker/main.py
    write_digests         digests of observations   wire/digests.py
    take_answered,        who has answered          processes/watch.py
    awaits_on

This file knows segments, words, records and buffers. States, policies and errors stay Python: whatever is not plain is
left to the reference, for one worker or one result at a time.

No signal handler of Python's runs inside these functions but where they call Python.
*/
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

static double
now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* What has become of something for one worker; an exception is set for FAILED. */
typedef enum { FAILED = -1, LEFT, DONE } Outcome;

#define HEAD 16   /* bytes of the head of a bank, see wire/banks.py */
#define NUMBERS 1 /* first byte of payload with infos of numbers, see wire/infos.py */

/* --- control words ---------------------------------------------------------------------------------------------------

Loads and stores are sequentially consistent. So what was written to a bank before a store is seen by whoever has loaded
what was stored; and of two sides of which each stores "I sleep", or a number, and then loads the other's word, one sees
what the other has stored: no wake-up is lost. */

typedef struct {
    PyObject_HEAD
    Py_buffer memory; /* stays mapped as long as this object lives */
    _Atomic int64_t *words;
    Py_ssize_t count;
} Words;

static PyTypeObject WordsType;

static PyObject *
words_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *memory;
    if (!PyArg_ParseTuple(args, "O", &memory)) {
        return NULL;
    }
    Words *self = (Words *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    /* A segment that only looks on is read-only; a store into it is refused below. */
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_SIMPLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->words = self->memory.buf;
    self->count = self->memory.len / (Py_ssize_t)sizeof(int64_t);
    return (PyObject *)self;
}

static void
words_dealloc(Words *self)
{
    PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static _Atomic int64_t *
word_at(Words *self, PyObject *key)
{
    Py_ssize_t index = PyLong_AsSsize_t(key);
    if (index < 0 || index >= self->count) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_IndexError, "there is no such control word");
        }
        return NULL;
    }
    return &self->words[index];
}

static PyObject *
words_get(Words *self, PyObject *key)
{
    _Atomic int64_t *word = word_at(self, key);
    return word == NULL ? NULL : PyLong_FromLongLong(atomic_load(word));
}

static int
words_set(Words *self, PyObject *key, PyObject *value)
{
    _Atomic int64_t *word = word_at(self, key);
    if (word == NULL) {
        return -1;
    }
    if (value == NULL || self->memory.readonly) {
        PyErr_SetString(PyExc_TypeError, "this control word cannot be changed");
        return -1;
    }
    long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    atomic_store(word, number);
    return 0;
}

static int
words_buffer(Words *self, Py_buffer *view, int flags)
{
    return PyObject_GetBuffer(self->memory.obj, view, flags);
}

/* Whether a word is, or becomes within so many seconds, another than the last. */
static int
differs(Words *self, Py_ssize_t index, int64_t last, double seconds)
{
    _Atomic int64_t *word = &self->words[index];
    int differs = atomic_load(word) != last;
    if (!differs && seconds > 0.0) {
        double until = now() + seconds;
        Py_BEGIN_ALLOW_THREADS
        while (!(differs = atomic_load(word) != last) && now() < until) {
            sched_yield();
        }
        Py_END_ALLOW_THREADS
    }
    return differs;
}

static PyMappingMethods words_mapping = {
    .mp_subscript = (binaryfunc)words_get,
    .mp_ass_subscript = (objobjargproc)words_set,
};
static PyBufferProcs words_as_buffer = {.bf_getbuffer = (getbufferproc)words_buffer};
static PyTypeObject WordsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multienv._engine._native.Words",
    .tp_doc = PyDoc_STR("Words(memory)\n--\n\nThe control words in a memory, as integers of 64 bits."),
    .tp_basicsize = sizeof(Words),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = words_new,
    .tp_dealloc = (destructor)words_dealloc,
    .tp_as_mapping = &words_mapping,
    .tp_as_buffer = &words_as_buffer,
};

/* --- objects and names of the reference --------------------------------------------------------------------------- */

/* An attribute of the objects that the reference works on. It is read and written in its place in the object, which is a
   tenth of what looking it up takes: so it must be in the __slots__ of the object's class. */
typedef struct {
    PyObject *name;
    PyTypeObject *type; /* of the last object that was asked about */
    Py_ssize_t offset;
} Field;

#define NAMES(X) X(acquire) X(columns) X(count_plain) X(dtype) X(is_astray) X(layout) X(release) X(view)               \
    X(wait_plain) X(with_infos)
#define CONSTANTS(X) X(SPIN_SECONDS) X(MISSING) X(MultienvError) X(RUNNING) X(SAMPLE) X(monotonic) X(BEGINS) X(_PATIENCE)

#define DECLARE_NAME(word) static PyObject *s_##word;
NAMES(DECLARE_NAME)
CONSTANTS(DECLARE_NAME)
static Field f_buffers, f_lock;

static PyObject **
place_of(PyObject *object, Field *field)
{
    if (!Py_IS_TYPE(object, field->type)) {
        PyObject *found = PyObject_GetAttr((PyObject *)Py_TYPE(object), field->name);
        PyMemberDef *member = NULL;
        if (found != NULL && Py_IS_TYPE(found, &PyMemberDescr_Type) &&
            PyType_IsSubtype(Py_TYPE(object), PyDescr_TYPE(found))) {
            member = ((PyMemberDescrObject *)found)->d_member;
        }
        Py_XDECREF(found);
        if (member == NULL || member->type != T_OBJECT_EX || member->flags & READONLY) {
            return (PyObject **)PyErr_Format(PyExc_TypeError, "%s has no slot for %U", Py_TYPE(object)->tp_name, field->name);
        }
        field->offset = member->offset;
        Py_XSETREF(field->type, (PyTypeObject *)Py_NewRef(Py_TYPE(object)));
    }
    return (PyObject **)((char *)object + field->offset);
}

static PyObject **
place_named(PyObject *object, const char *name)
{
    Field field = {PyUnicode_FromString(name)};
    PyObject **place = field.name == NULL ? NULL : place_of(object, &field);
    Py_XDECREF(field.name);
    Py_XDECREF(field.type);
    return place;
}

static inline void
put(PyObject **place, PyObject *value)
{
    Py_XSETREF(*place, Py_NewRef(value));
}

/* The names of recovery/hot_path.py. Constants are looked up there in each call, as the reference does. */
static PyObject *reference;

static PyObject *
constant(PyObject *name) /* borrowed */
{
    PyObject *found = reference == NULL ? NULL : PyDict_GetItemWithError(reference, name);
    if (found == NULL && !PyErr_Occurred()) {
        PyErr_SetObject(PyExc_NameError, name);
    }
    return found;
}

static int
number_constant(PyObject *name, double *number)
{
    PyObject *found = constant(name);
    *number = found == NULL ? -1.0 : PyFloat_AsDouble(found);
    return *number == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int
called(PyObject *result) /* of a method whose value does not matter */
{
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static PyObject *
time_from_now(double seconds)
{
    PyObject *clock = constant(s_monotonic);
    PyObject *begin = clock == NULL ? NULL : PyObject_CallNoArgs(clock);
    double time = begin == NULL ? 0.0 : PyFloat_AsDouble(begin);
    Py_XDECREF(begin);
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(time + seconds);
}

/* The number that an attribute of an object is. */
static int
number_at(PyObject *object, const char *name, Py_ssize_t *number)
{
    PyObject *found = PyObject_GetAttrString(object, name);
    *number = found == NULL ? -1 : PyLong_AsSsize_t(found);
    Py_XDECREF(found);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Numbers of multienv._engine.wire, and types of numpy, learned when they are first needed. */
#define BANKS(X) X(STEP) X(SKIPPED) X(PICKLED_ROWS)
#define ACTIONS(X) X(INT) X(ARRAY)
#define WORDS(X) X(REQUEST) X(REPLY) X(REPLY_PAYLOAD) X(WORKER_SLEEPS) X(BOUND) X(TRAINER_SLEEPS) X(SLOT) X(BUSY)
#define DECLARE_NUMBER(word) static Py_ssize_t word;
BANKS(DECLARE_NUMBER)
ACTIONS(DECLARE_NUMBER)
WORDS(DECLARE_NUMBER)
static PyObject *ndarray, *float64;

static int
learn_names(void)
{
    if (ndarray != NULL) {
        return 0;
    }
    PyObject *banks = PyImport_ImportModule("multienv._engine.wire.banks"), *actions = PyImport_ImportModule("multienv._engine.wire.actions"),
             *segment = PyImport_ImportModule("multienv._engine.wire.segment"), *numpy = PyImport_ImportModule("numpy");
    int failed = banks == NULL || actions == NULL || segment == NULL || numpy == NULL;
#define LEARN_FROM(module, word) failed = failed || number_at(module, #word, &word) < 0;
#define LEARN_OF_BANKS(word) LEARN_FROM(banks, word)
#define LEARN_OF_ACTIONS(word) LEARN_FROM(actions, word)
#define LEARN_OF_WORDS(word) LEARN_FROM(segment, word)
    BANKS(LEARN_OF_BANKS)
    ACTIONS(LEARN_OF_ACTIONS)
    WORDS(LEARN_OF_WORDS)
    failed = failed || (float64 = PyObject_GetAttrString(numpy, "float64")) == NULL ||
             (ndarray = PyObject_GetAttrString(numpy, "ndarray")) == NULL;
    Py_XDECREF(banks);
    Py_XDECREF(actions);
    Py_XDECREF(segment);
    Py_XDECREF(numpy);
    return failed ? -1 : 0;
}

/* --- actions ---------------------------------------------------------------------------------------------------------

A batch of actions, to be cut into one part for each worker. A worker that takes an array of so many numbers gets the
bytes; for any other each part is made an array, as the reference does for all. */

typedef struct {
    PyObject_HEAD
    PyObject *array, *cuts; /* a tuple of slices */
    Py_buffer view;
    uint64_t head; /* the first bytes of a bank with such actions */
} Parts;

static PyTypeObject PartsType;

static PyObject *
parts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *array, *cuts;
    unsigned long long head;
    if (!PyArg_ParseTuple(args, "OO!K", &array, &PyTuple_Type, &cuts, &head)) {
        return NULL;
    }
    Parts *self = (Parts *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->array = Py_NewRef(array);
    self->cuts = Py_NewRef(cuts);
    self->head = head;
    if (PyObject_GetBuffer(array, &self->view, PyBUF_ND) < 0) { /* also checks that it lies in one piece */
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
parts_dealloc(Parts *self)
{
    PyBuffer_Release(&self->view);
    Py_XDECREF(self->array);
    Py_XDECREF(self->cuts);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static Py_ssize_t
parts_length(Parts *self)
{
    return PyTuple_GET_SIZE(self->cuts);
}

static PyObject *
parts_item(Parts *self, Py_ssize_t index)
{
    if (index < 0 || index >= PyTuple_GET_SIZE(self->cuts)) {
        PyErr_SetString(PyExc_IndexError, "there is no such part");
        return NULL;
    }
    return PyObject_GetItem(self->array, PyTuple_GET_ITEM(self->cuts, index));
}

/* Writes a part into a bank, if it has so many numbers; whether it did. */
static int
write_part(Parts *self, Py_ssize_t index, long long numbers, int64_t request, Py_buffer *record)
{
    Py_ssize_t start, stop, step;
    if (index < 0 || index >= PyTuple_GET_SIZE(self->cuts) || self->view.ndim < 1 ||
        PySlice_Unpack(PyTuple_GET_ITEM(self->cuts, index), &start, &stop, &step) < 0) {
        PyErr_Clear();
        return 0;
    }
    Py_ssize_t rows = self->view.shape[0], row = rows ? self->view.len / rows : 0, size = (stop - start) * row;
    int fits = numbers > 0 && step == 1 && start >= 0 && start < stop && stop <= rows &&
               size == numbers * self->view.itemsize && HEAD + size <= record->len;
    if (fits) {
        uint64_t head[2] = {self->head, (uint32_t)request};
        memcpy(record->buf, head, sizeof head);
        memcpy((char *)record->buf + HEAD, (char *)self->view.buf + start * row, size);
    }
    return fits;
}

static PyMemberDef parts_members[] = {{"array", T_OBJECT_EX, offsetof(Parts, array), READONLY, NULL}, {NULL}};
static PySequenceMethods parts_sequence = {
    .sq_length = (lenfunc)parts_length,
    .sq_item = (ssizeargfunc)parts_item,
};
static PyTypeObject PartsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multienv._engine._native.Parts",
    .tp_doc = PyDoc_STR("Parts(array, cuts, head)\n--\n\nA batch of actions, cut into one part for each worker."),
    .tp_basicsize = sizeof(Parts),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = parts_new,
    .tp_dealloc = (destructor)parts_dealloc,
    .tp_as_sequence = &parts_sequence,
    .tp_members = parts_members,
};

/* --- infos of numbers --------------------------------------------------------------------------------------------- */

/* The infos of one reply, as long as they are numbers of the names and types of the last ones. */
typedef struct {
    PyObject *columns;   /* of the packer: names, types, formats, head; or NULL */
    const char *formats; /* one for each name */
    char *numbers;       /* of all slots */
    Py_ssize_t count;    /* of a slot; -1: none are known */
} Infos;

static void
forget_infos(Infos *infos)
{
    Py_CLEAR(infos->columns);
    PyMem_Free(infos->numbers);
    infos->numbers = NULL;
    infos->count = -1;
}

/* Learns names, types, formats and head, a tuple, or that there are none. */
static int
learn_infos(Infos *infos, PyObject *columns, Py_ssize_t slots)
{
    if (columns == infos->columns) {
        return 0;
    }
    forget_infos(infos);
    infos->columns = Py_NewRef(columns);
    if (columns == Py_None) {
        return 0;
    }
    if (!PyTuple_CheckExact(columns) || PyTuple_GET_SIZE(columns) < 4) {
        PyErr_SetString(PyExc_TypeError, "numbers of infos have names, types, formats and a head");
        return -1;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(PyTuple_GET_ITEM(columns, 0));
    infos->numbers = PyMem_Malloc(8 * count * slots + 1);
    if (infos->numbers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    infos->formats = PyBytes_AsString(PyTuple_GET_ITEM(columns, 2));
    infos->count = infos->formats == NULL ? -1 : count;
    return infos->formats == NULL ? -1 : 0;
}

/* Lays out a number in 8 bytes, as struct does with its format; LEFT: it is too large. */
static Outcome
lay_out(char format, PyObject *value, char *cell)
{
    memset(cell, 0, 8);
    if (format == 'd') { /* float, or numpy.float64, which is one */
        memcpy(cell, &((PyFloatObject *)value)->ob_fval, sizeof(double));
        return DONE;
    }
    if (format == '?') {
        *cell = value == Py_True;
        return DONE;
    }
    if (format == 'f') {
        float real = (float)PyFloat_AsDouble(value);
        memcpy(cell, &real, sizeof real);
        return PyErr_Occurred() ? FAILED : DONE;
    }
    int overflow;
    PyObject *integer = PyNumber_Index(value);
    int64_t number = integer == NULL ? -1 : PyLong_AsLongLongAndOverflow(integer, &overflow);
    Py_XDECREF(integer);
    if (integer == NULL || (number == -1 && PyErr_Occurred())) {
        return FAILED;
    }
    memcpy(cell, &number, format == 'q' ? 8 : format == 'i' ? 4 : 1); /* the lower bytes come first */
    return overflow ? LEFT : DONE;
}

/* Takes the info of a slot, if it is like the last ones; whether it was. */
static int
take_numbers(Infos *infos, Py_ssize_t slot, PyObject *info)
{
    if (infos->count < 0 || PyDict_GET_SIZE(info) != infos->count) {
        return 0;
    }
    PyObject *names = PyTuple_GET_ITEM(infos->columns, 0), *types = PyTuple_GET_ITEM(infos->columns, 1), *name, *value;
    char *cell = infos->numbers + 8 * infos->count * slot;
    Py_ssize_t iteration = 0;
    for (Py_ssize_t column = 0; PyDict_Next(info, &iteration, &name, &value); column++, cell += 8) {
        PyObject *expected = PyTuple_GET_ITEM(names, column);
        if (((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(types, column)) ||
            (name != expected && (!PyUnicode_CheckExact(name) || PyUnicode_Compare(name, expected) != 0)) ||
            lay_out(infos->formats[column], value, cell) != DONE) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* What take_numbers() has taken, as a dict again. */
static PyObject *
given_back(Infos *infos, Py_ssize_t slot)
{
    PyObject *info = PyDict_New(), *names = PyTuple_GET_ITEM(infos->columns, 0);
    char *cell = infos->numbers + 8 * infos->count * slot;
    for (Py_ssize_t column = 0; info != NULL && column < infos->count; column++, cell += 8) {
        double real;
        float small;
        int64_t number;
        int32_t integer;
        memcpy(&real, cell, sizeof real);
        memcpy(&small, cell, sizeof small);
        memcpy(&number, cell, sizeof number);
        memcpy(&integer, cell, sizeof integer);
        char format = infos->formats[column];
        PyObject *type = PyTuple_GET_ITEM(PyTuple_GET_ITEM(infos->columns, 1), column);
        PyObject *value = format == 'd'   ? PyFloat_FromDouble(real)
                          : format == 'f' ? PyFloat_FromDouble(small)
                          : format == '?' ? PyBool_FromLong(*cell)
                                          : PyLong_FromLongLong(format == 'i' ? integer : number);
        if (value != NULL && (PyObject *)Py_TYPE(value) != type) {
            Py_SETREF(value, PyObject_CallOneArg(type, value));
        }
        if (value == NULL || PyDict_SetItem(info, PyTuple_GET_ITEM(names, column), value) < 0) {
            Py_CLEAR(info);
        }
        Py_XDECREF(value);
    }
    return info;
}

/* Whether a payload of this length fits into its short area and begins with the head. */
static int
begins_with(Py_buffer *area, Py_ssize_t length, PyObject *head)
{
    Py_ssize_t size = PyBytes_GET_SIZE(head);
    return length <= area->len && size <= length && memcmp(area->buf, PyBytes_AS_STRING(head), size) == 0;
}

/* --- one worker, as the trainer's hot path sees it -------------------------------------------------------------------

Made once for each process. What it reads of the objects of the reference, and writes there, it finds by the places of
their attributes. They have it, and it has them: so the garbage collector goes through it. */

enum { SUPERVISOR, POSITION, PENDING, MAINTENANCE, JOURNAL, ANSWERS, OWNERS };
#define PLACES(X)                                                                                                      \
    X(SUPERVISOR, asked_by) X(SUPERVISOR, last_answer) X(SUPERVISOR, state) X(POSITION, number) X(POSITION, seen)      \
    X(POSITION, steps) X(PENDING, limit) X(PENDING, step_limit) X(PENDING, until) X(MAINTENANCE, is_due)               \
    X(JOURNAL, entries) X(JOURNAL, recording) X(ANSWERS, points_in)
/* What it has of its StepBuffers. */
#define PARTS(X) X(after) X(encode) X(meanings) X(read) X(ring)

/* One of the two banks. What a reply shows of the only env `shown` returns when it is called. Of a batch `shown` is the
   reply itself, and `full` the one that has `infos`, of which columns and rows are written. */
typedef struct {
    Py_buffer record, area; /* area: of short payloads */
    PyObject *shown, *full, *infos, **columns, **rows;
} HotSide;

typedef struct {
    PyObject_HEAD
    PyObject *owners; /* a tuple */
#define DECLARE_MEMBER(word) PyObject *word;
#define DECLARE_PLACE(owner, word) PyObject **word;
    PARTS(DECLARE_MEMBER)
    PLACES(DECLARE_PLACE)
    Words *words;
    HotSide sides[2];
    PyObject *described; /* tells what infos of numbers a payload has */
    Infos infos;
    Py_ssize_t elements, spins, slots, rewards; /* rewards: their offset in a bank */
    PyObject *int64;                            /* NULL, or actions are integers, see wire/actions.py */
    unsigned long long head, head_of_int64;
    int verbatim;
} Hot;

static PyTypeObject HotType;

static int
hot_traverse(Hot *self, visitproc visit, void *arg)
{
#define VISIT_MEMBER(word) Py_VISIT(self->word);
    Py_VISIT(self->owners);
    PARTS(VISIT_MEMBER)
    for (int side = 0; side < 2; side++) {
        Py_VISIT(self->sides[side].shown);
        Py_VISIT(self->sides[side].full);
    }
    return 0;
}

static int
hot_clear(Hot *self)
{
#define CLEAR_MEMBER(word) Py_CLEAR(self->word);
    Py_CLEAR(self->owners);
    PARTS(CLEAR_MEMBER)
    Py_CLEAR(self->words);
    Py_CLEAR(self->described);
    Py_CLEAR(self->int64);
    for (int each = 0; each < 2; each++) {
        HotSide *side = &self->sides[each];
        Py_CLEAR(side->shown);
        Py_CLEAR(side->full);
        Py_CLEAR(side->infos);
        PyBuffer_Release(&side->record);
        PyBuffer_Release(&side->area);
    }
    forget_infos(&self->infos);
    return 0;
}

/* Of all types that the garbage collector goes through. */
static void
clear_and_free(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Py_TYPE(self)->tp_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Takes a part of what a StepBuffers has for both banks. */
static int
take_buffers(PyObject *both, int side, Py_buffer *buffer)
{
    PyObject *memory = PySequence_GetItem(both, side);
    int failed = memory == NULL || PyObject_GetBuffer(memory, buffer, PyBUF_SIMPLE) < 0;
    Py_XDECREF(memory);
    return failed ? -1 : 0;
}

static PyObject *
hot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"owners", "buffers", "areas", "slots", "rewards", "shown", "infos", "described", "int64",
                            "head", "head_of_int64", NULL};
    PyObject *owners, *buffers, *areas, *shown, *infos, *described, *int64, *records = NULL, *words = NULL;
    Py_ssize_t slots, rewards;
    unsigned long long head, head_of_int64;
    if (learn_names() < 0 ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO!nnO!OOOKK", names, &PyTuple_Type, &owners, &buffers,
                                     &PyList_Type, &areas, &slots, &rewards, &PyList_Type, &shown, &infos, &described,
                                     &int64, &head, &head_of_int64)) {
        return NULL;
    }
    Hot *self = (Hot *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->owners = Py_NewRef(owners);
    self->described = Py_NewRef(described);
    self->int64 = int64 == Py_None ? NULL : Py_NewRef(int64);
    self->head = head;
    self->head_of_int64 = head_of_int64;
    self->slots = slots;
    self->rewards = rewards;
    self->infos.count = -1;
    self->verbatim = infos == Py_None;
    int failed = PyTuple_GET_SIZE(owners) != OWNERS || number_at(buffers, "elements", &self->elements) < 0 ||
                 number_at(buffers, "spins", &self->spins) < 0 ||
                 (words = PyObject_GetAttrString(buffers, "words")) == NULL ||
                 (records = PyObject_GetAttrString(buffers, "records")) == NULL;
#define FIND_PLACE(owner, word)                                                                                        \
    failed = failed || (self->word = place_named(PyTuple_GET_ITEM(owners, owner), #word)) == NULL;
#define TAKE_PART(word) failed = failed || (self->word = PyObject_GetAttrString(buffers, #word)) == NULL;
    PLACES(FIND_PLACE)
    PARTS(TAKE_PART)
    failed = failed || !Py_IS_TYPE(words, &WordsType) || !PyTuple_CheckExact(self->after);
    self->words = (Words *)words;
    for (int each = 0; each < 2 && !failed; each++) {
        HotSide *side = &self->sides[each];
        failed = take_buffers(records, each, &side->record) < 0 || take_buffers(areas, each, &side->area) < 0 ||
                 (side->shown = PySequence_GetItem(shown, each)) == NULL ||
                 side->record.len < rewards + 8 * slots || rewards < HEAD + (self->int64 ? 8 : 0);
        if (!failed && !self->verbatim) {
            failed = (side->full = PySequence_GetItem(shown, each + 2)) == NULL ||
                     (side->infos = PySequence_GetItem(infos, each)) == NULL ||
                     (side->columns = place_named(side->infos, "columns")) == NULL ||
                     (side->rows = place_named(side->infos, "rows")) == NULL;
        }
    }
    Py_XDECREF(records);
    if (failed) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "this is not what a worker is made of");
    }
    return (PyObject *)self;
}

static PyMemberDef hot_members[] = {
    {"encode", T_OBJECT_EX, offsetof(Hot, encode), 0, PyDoc_STR("writes the action of any step into its bank")},
    {"ring", T_OBJECT_EX, offsetof(Hot, ring), 0, PyDoc_STR("wakes the worker")},
    {NULL},
};
static PyTypeObject HotType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multienv._engine._native.Hot",
    .tp_doc = PyDoc_STR("What the hot path touches of one process; see recovery/hot_path.py."),
    .tp_basicsize = sizeof(Hot),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = hot_new,
    .tp_traverse = (traverseproc)hot_traverse,
    .tp_clear = (inquiry)hot_clear,
    .tp_dealloc = clear_and_free,
    .tp_members = hot_members,
};

/* What the hot path touches of a supervisor's process, which has a number for the next request; new reference. Without
   an exception NULL: it has none. */
static Hot *
hot_of(PyObject *supervisor, PyObject **number, int64_t *request)
{
    PyObject **place = place_of(supervisor, &f_buffers);
    if (place == NULL || *place == NULL || !Py_IS_TYPE(*place, &HotType) ||
        PyTuple_GET_ITEM(((Hot *)*place)->owners, SUPERVISOR) != supervisor) {
        return NULL;
    }
    Hot *hot = (Hot *)*place;
    long long last = PyLong_AsLongLong(*hot->number);
    *request = last + 1;
    *number = last == -1 && PyErr_Occurred() ? NULL : PyLong_FromLongLong(last + 1);
    return *number == NULL ? NULL : (Hot *)Py_NewRef(hot);
}

/* Writes an action that is an integer. */
static Outcome
write_integer(Hot *hot, int64_t request, PyObject *action)
{
    int overflow = 0, is_int64 = (PyObject *)Py_TYPE(action) == hot->int64;
    if (hot->int64 == NULL || !(is_int64 || PyLong_CheckExact(action))) {
        return LEFT;
    }
    int64_t value = is_int64 ? PyLong_AsLongLong(action) : PyLong_AsLongLongAndOverflow(action, &overflow);
    if (overflow || (value == -1 && PyErr_Occurred())) {
        return overflow ? LEFT : FAILED;
    }
    uint64_t head[2] = {is_int64 ? hot->head_of_int64 : hot->head, (uint32_t)request};
    char *bank = hot->sides[request & 1].record.buf;
    memcpy(bank, head, sizeof head);
    memcpy(bank + HEAD, &value, sizeof value);
    return DONE;
}

/* Writes the action of a member into its bank; LEFT: the supervisor refuses it. */
static Outcome
write_action(Hot *hot, PyObject *number, int64_t request, PyObject *actions, Py_ssize_t member)
{
    if (Py_IS_TYPE(actions, &PartsType) &&
        write_part((Parts *)actions, member, hot->elements, request, &hot->sides[request & 1].record)) {
        return DONE;
    }
    PyObject *action = PySequence_GetItem(actions, member);
    Outcome outcome = action == NULL ? FAILED : write_integer(hot, request, action);
    if (outcome == LEFT) {
        outcome = called(PyObject_CallFunctionObjArgs(hot->encode, number, action, NULL)) < 0 ? FAILED : DONE;
        PyObject *refused = outcome == DONE ? NULL : constant(s_MultienvError);
        if (refused != NULL && PyErr_ExceptionMatches(refused)) { /* the supervisor raises it once more */
            PyErr_Clear();
            outcome = LEFT;
        }
    }
    Py_XDECREF(action);
    return outcome;
}

/* How workers that are about to be asked are watched: a Watched. */
enum { KNOWN, ASKED, SLEEPS };

/* Notes that a member is asked; LEFT: its process is not watched. */
static Outcome
note_asked(PyObject *watched, PyObject *member, Hot *hot, PyObject *number)
{
    PyObject *known = PyDict_GetItemWithError(PyTuple_GET_ITEM(watched, KNOWN), member);
    if (known != (PyObject *)hot->words) {
        return PyErr_Occurred() ? FAILED : LEFT;
    }
    PyObject *line = PyTuple_Pack(2, hot->words, number);
    int failed = line == NULL || PyDict_SetItem(PyTuple_GET_ITEM(watched, ASKED), member, line) < 0;
    Py_XDECREF(line);
    atomic_store(&hot->words->words[TRAINER_SLEEPS], PyTuple_GET_ITEM(watched, SLEEPS) == Py_True);
    return failed ? FAILED : DONE;
}

/* Keeps what send_plain() shares between workers. */
typedef struct {
    PyObject *actions, *state, *asker, *watched; /* watched: NULL, or a Watched */
} Sending;

static Outcome
send_one(PyObject *supervisor, PyObject *member, Py_ssize_t place, Sending *sending)
{
    int64_t request;
    PyObject *number = NULL, *until = NULL, *running = constant(s_RUNNING);
    Hot *hot = running == NULL ? NULL : hot_of(supervisor, &number, &request);
    if (hot == NULL) {
        return PyErr_Occurred() ? FAILED : LEFT;
    }
    Outcome outcome = LEFT;
    if (*hot->state == running && *hot->asked_by == sending->asker && *hot->is_due == Py_False) {
        outcome = write_action(hot, number, request, sending->actions, place);
    }
    if (outcome == DONE && sending->watched != NULL) {
        outcome = note_asked(sending->watched, member, hot, number);
    }
    if (outcome == DONE) {
        PyObject *limit = *hot->step_limit;
        double seconds = limit == Py_None ? 0.0 : PyFloat_AsDouble(limit);
        until = limit == Py_None ? Py_NewRef(Py_None) : PyErr_Occurred() ? NULL : time_from_now(seconds);
        outcome = until == NULL ? FAILED : DONE;
    }
    if (outcome == DONE) {
        put(hot->limit, *hot->step_limit);
        put(hot->until, until);
        put(hot->state, sending->state);
        atomic_store(&hot->words->words[REQUEST], request);
        if (atomic_load(&hot->words->words[WORKER_SLEEPS]) && called(PyObject_CallOneArg(hot->ring, number)) < 0) {
            outcome = FAILED;
        }
    }
    Py_XDECREF(until);
    Py_DECREF(number);
    Py_DECREF(hot);
    return outcome;
}

/* Whether infos of numbers are of the names and types that are known now, after a look at them. */
static int
are_known(Hot *hot, Py_buffer *area, Py_ssize_t length)
{
    Infos *infos = &hot->infos;
    if (infos->count < 0 || !begins_with(area, length, PyTuple_GET_ITEM(infos->columns, 3))) {
        PyObject *columns = PyObject_CallFunction(hot->described, "y#", area->buf, length);
        int failed = columns == NULL || learn_infos(infos, columns, hot->slots) < 0;
        Py_XDECREF(columns);
        if (failed || infos->count < 0) {
            return 0;
        }
    }
    return length - PyBytes_GET_SIZE(PyTuple_GET_ITEM(infos->columns, 3)) == 8 * infos->count * hot->slots;
}

/* What the only env returned, in a reply that ends nothing; `numbers`: of its info. */
static PyObject *
read_transition(Hot *hot, HotSide *side, const char *numbers)
{
    const char *bank = side->record.buf;
    double number;
    memcpy(&number, bank + hot->rewards, sizeof number);
    if (numbers != NULL) {
        memcpy(hot->infos.numbers, numbers, 8 * hot->infos.count);
    }
    PyObject *info = numbers == NULL ? PyDict_New() : given_back(&hot->infos, 0);
    PyObject *observation = info == NULL ? NULL : PyObject_CallNoArgs(side->shown);
    PyObject *reward = PyFloat_FromDouble(number), *transition = NULL;
    if (bank[4] == 1 && reward != NULL) { /* of numpy's type, see REWARD_TYPES in wire/codecs.py */
        Py_SETREF(reward, PyObject_CallOneArg(float64, reward));
    }
    if (observation != NULL && reward != NULL) {
        transition = PyTuple_Pack(5, observation, reward, Py_False, Py_False, info);
    }
    Py_XDECREF(info);
    Py_XDECREF(observation);
    Py_XDECREF(reward);
    return transition;
}

/* The rows of a batch: arrays over its banks, the same for each reply but for their infos, which are `numbers`. */
static PyObject *
read_rows(Hot *hot, HotSide *side, const char *numbers)
{
    if (numbers == NULL) {
        return Py_NewRef(side->shown);
    }
    PyObject *rows = PyBytes_FromStringAndSize(numbers, 8 * hot->infos.count * hot->slots);
    if (rows == NULL) {
        return NULL;
    }
    put(side->columns, PyTuple_GET_ITEM(hot->infos.columns, 4));
    Py_XSETREF(*side->rows, rows);
    return Py_NewRef(side->full);
}

/* The answer in a plain reply; None: its infos are pickled. */
static PyObject *
read_reply(Hot *hot, PyObject *number, int64_t request)
{
    HotSide *side = &hot->sides[request & 1];
    const unsigned char *bank = side->record.buf;
    Py_ssize_t length = atomic_load(&hot->words->words[REPLY_PAYLOAD + (request & 1)]);
    const char *payload = side->area.buf, *numbers = NULL;
    int is_plain = length <= side->area.len && (!hot->verbatim || (bank[3] == 0 && bank[4] <= 1));
    if (is_plain && length) {
        if (*payload != NUMBERS) {
            Py_RETURN_NONE;
        }
        is_plain = are_known(hot, &side->area, length);
        numbers = is_plain ? payload + PyBytes_GET_SIZE(PyTuple_GET_ITEM(hot->infos.columns, 3)) : NULL;
    }
    if (!is_plain) {
        return PyErr_Occurred() ? NULL : PyObject_CallOneArg(hot->read, number);
    }
    return hot->verbatim ? read_transition(hot, side, numbers) : read_rows(hot, side, numbers);
}

/* Looks for the reply; whether it is there. */
static int
spin(Words *words, int64_t request, long long spins)
{
    double most;
    if (number_constant(s_SPIN_SECONDS, &most) < 0) {
        return -1;
    }
    _Atomic int64_t *reply = &words->words[REPLY];
    int is_there = 0;
    Py_BEGIN_ALLOW_THREADS
    double until = now() + most;
    while (!(is_there = atomic_load(reply) == request) && spins) {
        sched_yield();
        spins = now() < until ? spins - 1 : 0;
    }
    Py_END_ALLOW_THREADS
    return is_there;
}

/* Keeps what collect_plain() shares between workers. */
typedef struct {
    PyObject *state, *until;
    int several, leaves_ends;
} Collecting;

/* Waits for the reply; whether it is there. */
static int
wait_for(PyObject *supervisor, Hot *hot, PyObject *number, int64_t request, Collecting *collecting)
{
    int is_there = hot->spins != 0 && atomic_load(&hot->words->words[REPLY]) == request;
    if (hot->spins && !is_there) {
        is_there = spin(hot->words, request, hot->spins);
    }
    if (is_there) {
        return is_there;
    }
    double patience;
    if (collecting->several && collecting->until == NULL &&
        (number_constant(s__PATIENCE, &patience) < 0 || (collecting->until = time_from_now(patience)) == NULL)) {
        return -1;
    }
    PyObject *until = collecting->until == NULL ? Py_None : collecting->until;
    PyObject *answer = PyObject_CallMethodObjArgs(supervisor, s_wait_plain, number, until, NULL);
    is_there = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return is_there;
}

/* What the head of a reply means, as the number that the reference has for it (borrowed); NULL: it is not plain. */
static PyObject *
meaning_of(Hot *hot, int64_t request)
{
    uint64_t first;
    memcpy(&first, hot->sides[request & 1].record.buf, sizeof first);
    PyObject *head = PyLong_FromUnsignedLongLong(first);
    PyObject *meaning = head == NULL ? NULL : PyDict_GetItemWithError(hot->meanings, head);
    Py_XDECREF(head);
    return meaning;
}

/* Journals an answer, stores it and all that says so, and counts it. */
static int
commit(PyObject *supervisor, Hot *hot, PyObject *number, int64_t request, PyObject *answer, PyObject *meaning)
{
    double sample;
    long long points_in = PyLong_AsLongLong(*hot->points_in);
    int recording = PyObject_IsTrue(*hot->recording);
    if (recording > 0) {
        Py_buffer *record = &hot->sides[request & 1].record;
        PyObject *entry = PyBytes_FromStringAndSize(record->buf, record->len);
        int failed = entry == NULL || PyDict_SetItem(*hot->entries, number, entry) < 0;
        Py_XDECREF(entry);
        recording = failed ? -1 : 1;
    }
    if (recording < 0 || (points_in == -1 && PyErr_Occurred()) || number_constant(s_SAMPLE, &sample) < 0) {
        return -1;
    }
    long after = PyLong_AsLong(meaning);
    /* One store: no Python code, so no signal handler, runs between these, once the answer before is let go. */
    put(hot->last_answer, answer);
    put(hot->seen, number);
    put(hot->number, number);
    put(hot->state, PyTuple_GET_ITEM(hot->after, after));
    if (after || points_in == request || !(request & (int64_t)sample)) {
        return called(PyObject_CallMethodObjArgs(supervisor, s_count_plain, answer, number, meaning, NULL));
    }
    long long steps = PyLong_AsLongLong(*hot->steps);
    PyObject *more = steps == -1 && PyErr_Occurred() ? NULL : PyLong_FromLongLong(steps + 1);
    if (more == NULL) {
        return -1;
    }
    Py_SETREF(*hot->steps, more);
    return 0;
}

static Outcome
collect_one(PyObject *supervisor, PyObject *answers, PyObject *member, Collecting *collecting)
{
    int64_t request;
    PyObject *number = NULL, *answer = NULL, *known;
    Hot *hot = hot_of(supervisor, &number, &request);
    if (hot == NULL) {
        return PyErr_Occurred() ? FAILED : LEFT;
    }
    int is_there = *hot->state == collecting->state ? wait_for(supervisor, hot, number, request, collecting) : 0;
    if (is_there > 0 && (known = meaning_of(hot, request)) != NULL) {
        int begins = known == constant(s_BEGINS);
        if (!begins || atomic_load(&hot->words->words[REQUEST]) == request) {
            answer = read_reply(hot, number, request);
            if (answer == Py_None) {
                Py_SETREF(answer, PyObject_CallMethodOneArg(supervisor, s_with_infos, number));
            }
            if (answer != NULL && begins && answer != Py_None) {
                Py_SETREF(answer, PyTuple_Pack(2, PyTuple_GET_ITEM(answer, 0), PyTuple_GET_ITEM(answer, 4)));
            }
        }
        if (answer == Py_None ||
            (answer != NULL && (commit(supervisor, hot, number, request, answer, known) < 0 ||
                                (collecting->leaves_ends && PyObject_IsTrue(known))))) {
            Py_CLEAR(answer);
        }
    }
    Py_DECREF(number);
    Py_DECREF(hot);
    if (answer != NULL) {
        int failed = PyObject_SetItem(answers, member, answer) < 0;
        Py_DECREF(answer);
        return failed ? FAILED : DONE;
    }
    return PyErr_Occurred() ? FAILED : LEFT;
}

/* Takes a lock; it is not held if that fails. */
static PyObject *
locked(PyObject *supervisor)
{
    PyObject **place = place_of(supervisor, &f_lock), *lock = place == NULL ? NULL : Py_XNewRef(*place);
    if (lock != NULL && called(PyObject_CallMethodNoArgs(lock, s_acquire)) < 0) {
        Py_CLEAR(lock);
    }
    return lock;
}

/* Lets go of a lock, whatever exception is set; that exception stays, as it does at the end of `with`. */
static Outcome
unlocked(PyObject *lock, Outcome outcome)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (called(PyObject_CallMethodNoArgs(lock, s_release)) < 0) {
        outcome = FAILED;
    }
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    }
    Py_DECREF(lock);
    return outcome;
}

PyDoc_STRVAR(send_plain_doc, "send_plain(supervisors, members, done, actions, state, asker, nothing=MISSING, watched=None)\n--\n\n\
Do what recovery.hot_path.send_plain does.");

static PyObject *
send_plain(PyObject *module, PyObject *args)
{
    PyObject *supervisors, *given, *nothing = constant(s_MISSING);
    Sending sending = {0};
    Py_ssize_t place;
    if (nothing == NULL || !PyArg_ParseTuple(args, "OOnOOO|OO!", &supervisors, &given, &place, &sending.actions,
                                             &sending.state, &sending.asker, &nothing, &PyTuple_Type, &sending.watched)) {
        return NULL;
    }
    PyObject *members = PySequence_Tuple(given);
    if (members == NULL) {
        return NULL;
    }
    Outcome outcome = DONE;
    for (; place < PyTuple_GET_SIZE(members); place++) {
        PyObject *name = PyTuple_GET_ITEM(members, place);
        Py_ssize_t member = PyLong_AsSsize_t(name), part = sending.watched == NULL ? member : place;
        if (!Py_IS_TYPE(sending.actions, &PartsType)) {
            PyObject *action = PySequence_GetItem(sending.actions, part);
            Py_XDECREF(action); /* the actions hold it */
            if (action == NULL || action == nothing) {
                outcome = action == NULL ? FAILED : DONE;
                break;
            }
        }
        PyObject *supervisor = PySequence_GetItem(supervisors, member);
        PyObject *lock = supervisor == NULL ? NULL : locked(supervisor);
        outcome = lock == NULL ? FAILED : send_one(supervisor, name, part, &sending);
        if (lock != NULL) {
            outcome = unlocked(lock, outcome);
        }
        Py_XDECREF(supervisor);
        if (outcome != DONE) {
            break;
        }
    }
    Py_DECREF(members);
    return outcome == FAILED ? NULL : PyLong_FromSsize_t(place);
}

PyDoc_STRVAR(collect_plain_doc, "collect_plain(supervisors, members, answers, state, leaves_ends=False)\n--\n\n\
Do what recovery.hot_path.collect_plain does.");

static PyObject *
collect_plain(PyObject *module, PyObject *args)
{
    PyObject *supervisors, *given, *answers;
    Collecting collecting = {0};
    if (!PyArg_ParseTuple(args, "OOOO|p", &supervisors, &given, &answers, &collecting.state, &collecting.leaves_ends)) {
        return NULL;
    }
    PyObject *members = PySequence_Tuple(given);
    if (members == NULL) {
        return NULL;
    }
    int is_left = 0;
    Outcome outcome = DONE;
    collecting.several = PyTuple_GET_SIZE(members) > 1;
    for (Py_ssize_t turn = PyTuple_GET_SIZE(members) - 1; turn >= 0 && outcome != FAILED; turn--) {
        PyObject *name = PyTuple_GET_ITEM(members, turn);
        Py_ssize_t member = PyLong_AsSsize_t(name);
        PyObject *supervisor = PySequence_GetItem(supervisors, member);
        PyObject *lock = supervisor == NULL ? NULL : locked(supervisor);
        outcome = lock == NULL ? FAILED : collect_one(supervisor, answers, name, &collecting);
        if (lock != NULL) {
            outcome = unlocked(lock, outcome);
        }
        Py_XDECREF(supervisor);
        is_left |= outcome == LEFT;
    }
    Py_XDECREF(collecting.until);
    Py_DECREF(members);
    return outcome == FAILED ? NULL : PyBool_FromLong(is_left);
}

/* Takes the next of the workers that were asked: its member (borrowed), its words, and whether it has answered. */
static Outcome
next_asked(PyObject *asked, Py_ssize_t *place, PyObject **member, Words **words, int *has_answered)
{
    PyObject *value, *number;
    if (!PyDict_Check(asked)) {
        PyErr_SetString(PyExc_TypeError, "what is asked is a dict");
        return FAILED;
    }
    if (!PyDict_Next(asked, place, member, &value)) {
        return LEFT;
    }
    if (!PyArg_ParseTuple(value, "O!O", &WordsType, words, &number)) {
        return FAILED;
    }
    *has_answered = atomic_load(&(*words)->words[REPLY]) == PyLong_AsLongLong(number);
    return PyErr_Occurred() ? FAILED : DONE;
}

PyDoc_STRVAR(take_answered_doc, "take_answered(asked)\n--\n\n\
Do what processes.watch.take_answered does.");

static PyObject *
take_answered(PyObject *module, PyObject *asked)
{
    PyObject *found = PyList_New(0), *member;
    Words *words;
    Py_ssize_t place = 0;
    int has_answered;
    Outcome outcome = found == NULL ? FAILED : DONE;
    while (outcome == DONE && (outcome = next_asked(asked, &place, &member, &words, &has_answered)) == DONE) {
        outcome = has_answered && PyList_Append(found, member) < 0 ? FAILED : DONE;
    }
    for (Py_ssize_t turn = 0; outcome != FAILED && turn < PyList_GET_SIZE(found); turn++) {
        outcome = PyDict_DelItem(asked, PyList_GET_ITEM(found, turn)) < 0 ? FAILED : DONE;
    }
    if (outcome == FAILED) {
        Py_CLEAR(found);
    }
    return found;
}

PyDoc_STRVAR(awaits_on_doc, "awaits_on(core, asked)\n--\n\n\
Do what processes.watch.awaits_on does.");

static PyObject *
awaits_on(PyObject *module, PyObject *args)
{
    PyObject *asked, *member;
    Words *words;
    Py_ssize_t place = 0;
    int core, has_answered, is_awaited = 0;
    Outcome outcome = DONE;
    if (!PyArg_ParseTuple(args, "iO", &core, &asked)) {
        return NULL;
    }
    while (!is_awaited && (outcome = next_asked(asked, &place, &member, &words, &has_answered)) == DONE) {
        is_awaited = core >= 0 && !has_answered && atomic_load(&words->words[BOUND]) == 1 + core;
    }
    return outcome == FAILED ? NULL : PyBool_FromLong(is_awaited);
}

PyDoc_STRVAR(follow_doc, "follow(reference)\n--\n\n\
Take constants from the names of recovery.hot_path; false if those of another copy of it are taken already.");

static PyObject *
follow(PyObject *module, PyObject *names)
{
    if (!PyDict_Check(names)) {
        PyErr_SetString(PyExc_TypeError, "names of a module are a dict");
        return NULL;
    }
    if (reference != NULL && reference != names) { /* multienv was imported once more: the first one has this */
        Py_RETURN_FALSE;
    }
    if (learn_names() < 0) {
        return NULL;
    }
    Py_XSETREF(reference, Py_NewRef(names));
    Py_RETURN_TRUE;
}

/* --- the worker's half -----------------------------------------------------------------------------------------------

What a step returned that goes on with the episode, in the types that most envs use, is written here. All else is left
to functions of the reference, result by result. */

typedef struct {
    Py_buffer bank, area, whole; /* area: of short payloads; whole: of all observations, if they are arrays */
    PyObject *dtype, *cells, *key, *digest, *side;
    PyObject **reply_flags; /* an attribute of side */
    Py_ssize_t rewards, flags, unset; /* unset: bytes of flags and of digests of final observations */
} Side;

#define STEPPER(X)                                                                                                     \
    X(reference) X(rest) X(note_error) X(finish) X(fail) X(write_payload) X(take_info) X(generators) X(words)         \
    X(calls) X(decode) X(packer) X(is_verbatim)

typedef struct {
    PyObject_HEAD
    STEPPER(DECLARE_MEMBER)
    Side sides[2];
    Infos infos;
    Py_ssize_t slots;
    int verbatim; /* the values of the only env travel to the bit */
} Stepper;

/* Appends (slot, info) to the list; takes the reference to the info. */
static int
append_info(PyObject *list, Py_ssize_t slot, PyObject *info)
{
    PyObject *pair = info == NULL ? NULL : Py_BuildValue("(nN)", slot, info);
    int failed = pair == NULL || PyList_Append(list, pair) < 0;
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* Learns from the packer how the last infos were. */
static int
learn_from_packer(Stepper *self)
{
    PyObject *columns = PyObject_GetAttr(self->packer, s_columns);
    int failed = columns == NULL || learn_infos(&self->infos, columns, self->slots) < 0;
    Py_XDECREF(columns);
    return failed ? -1 : 0;
}

/* Writes a payload into its short area: the head, and the numbers of all slots. */
static int
write_numbers(Stepper *self, Side *side, PyObject *number, int64_t request)
{
    PyObject *head = PyTuple_GET_ITEM(self->infos.columns, 3);
    Py_ssize_t length = PyBytes_GET_SIZE(head), size = 8 * self->infos.count * self->slots;
    if (length + size <= side->area.len) {
        memcpy(side->area.buf, PyBytes_AS_STRING(head), length);
        memcpy((char *)side->area.buf + length, self->infos.numbers, size);
        atomic_store(&((Words *)self->words)->words[REPLY_PAYLOAD + (request & 1)], length + size);
        return 0;
    }
    PyObject *numbers = PyBytes_FromStringAndSize(self->infos.numbers, size);
    PyObject *whole = numbers == NULL ? NULL : PySequence_Concat(head, numbers);
    int failed = whole == NULL || called(PyObject_CallFunctionObjArgs(self->write_payload, number, whole, NULL)) < 0;
    Py_XDECREF(numbers);
    Py_XDECREF(whole);
    return failed ? -1 : 0;
}

static void
write_no_payload(Stepper *self, int64_t request)
{
    _Atomic int64_t *payload = &((Words *)self->words)->words[REPLY_PAYLOAD + (request & 1)];
    if (atomic_load(payload)) {
        atomic_store(payload, 0);
    }
}

/* What becomes of a value that is refused: LEFT, if the reference may know what to do with it. */
static Outcome
refused(void)
{
    int is_misfit = PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
                    PyErr_ExceptionMatches(PyExc_OverflowError);
    if (is_misfit) {
        PyErr_Clear();
    }
    return is_misfit ? LEFT : FAILED;
}

/* Copies an observation to its row; LEFT: it does not fit, or may fit all the same. */
static Outcome
write_observation(Side *side, Py_ssize_t slot, PyObject *observation)
{
    if (side->whole.buf != NULL && (PyObject *)Py_TYPE(observation) == ndarray) {
        PyObject *dtype = PyObject_GetAttr(observation, s_dtype);
        Py_XDECREF(dtype); /* the array has it */
        Py_buffer seen;
        if (dtype == side->dtype && PyObject_GetBuffer(observation, &seen, PyBUF_ND) == 0) {
            Py_ssize_t row = side->whole.len / side->whole.shape[0];
            int fits = seen.ndim == side->whole.ndim - 1;
            for (int axis = 0; fits && axis < seen.ndim; axis++) {
                fits = seen.shape[axis] == side->whole.shape[axis + 1];
            }
            if (fits) {
                memcpy((char *)side->whole.buf + slot * row, seen.buf, row);
            }
            PyBuffer_Release(&seen);
            if (fits) {
                return DONE;
            }
        }
        PyErr_Clear(); /* not in one piece */
    }
    PyObject *cell = PySequence_GetItem(side->cells, slot);
    int failed = cell == NULL || PyObject_SetItem(cell, side->key, observation) < 0;
    Py_XDECREF(cell);
    return failed ? refused() : DONE;
}

/* Whether an env has returned False for this flag, to the bit if it is verbatim. */
static Outcome
goes_on(Stepper *self, PyObject *flag)
{
    int is_true = flag == Py_False ? 0 : self->verbatim ? 1 : PyObject_IsTrue(flag);
    return is_true < 0 ? refused() : is_true ? LEFT : DONE;
}

/* Writes what an env returned; LEFT: the reference is to. */
static Outcome
write_row(Stepper *self, Side *side, Py_ssize_t slot, PyObject *result)
{
    if (!PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 5) {
        return LEFT;
    }
    for (int flag = 2; flag < 4; flag++) {
        Outcome outcome = goes_on(self, PyTuple_GET_ITEM(result, flag));
        if (outcome != DONE) {
            return outcome;
        }
    }
    PyObject *observation = PyTuple_GET_ITEM(result, 0), *given = PyTuple_GET_ITEM(result, 1);
    if (self->verbatim) {
        int is_float64 = (PyObject *)Py_TYPE(given) == float64;
        if (!(is_float64 || PyFloat_CheckExact(given)) || (PyObject *)Py_TYPE(observation) != ndarray) {
            return LEFT;
        }
        ((unsigned char *)side->bank.buf)[4] = is_float64; /* its place in REWARD_TYPES, see wire/codecs.py */
    }
    double reward = PyFloat_AsDouble(given);
    if (reward == -1.0 && PyErr_Occurred()) {
        return refused();
    }
    memcpy((char *)side->bank.buf + side->rewards + 8 * slot, &reward, sizeof reward);
    return write_observation(side, slot, observation);
}

/* Takes the exception that is set as an argument, if an env may raise it; new reference. */
static PyObject *
taken_exception(void)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return NULL;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

/* Answers that the request has failed, if what is set is an exception that an env may raise. */
static int
answer_failed(Stepper *self, PyObject *number)
{
    PyObject *error = taken_exception();
    int failed = error == NULL || called(PyObject_CallFunctionObjArgs(self->fail, number, error, NULL)) < 0;
    Py_XDECREF(error);
    return failed ? -1 : 0;
}

/* What envs have come to besides their rows. */
typedef struct {
    PyObject *infos, *failures; /* a list and a dict, or NULL */
    Py_ssize_t taken;           /* so many infos have been taken as numbers, of the first slots */
} Beside;

/* Makes the list and the dict. */
static int
begin_beside(Stepper *self, Beside *beside)
{
    if (beside->infos == NULL) {
        beside->infos = PyList_New(0);
        Py_XSETREF(beside->failures, PyDict_New());
        for (Py_ssize_t slot = 0; beside->infos != NULL && slot < beside->taken; slot++) {
            if (append_info(beside->infos, slot, given_back(&self->infos, slot)) < 0) {
                Py_CLEAR(beside->infos);
            }
        }
    }
    return beside->infos == NULL || beside->failures == NULL ? -1 : 0;
}

/* The actions of all slots, or the action of the only env; new reference. */
static PyObject *
actions_of(Stepper *self, PyObject *number, const unsigned char *bank)
{
    if (bank[1] == INT) {
        int64_t value;
        memcpy(&value, bank + HEAD, sizeof value);
        return PyLong_FromLongLong(value);
    }
    PyObject *tag = PyLong_FromLong(bank[1]);
    PyObject *decoded = tag == NULL ? NULL : PyObject_CallFunctionObjArgs(self->decode, number, tag, NULL);
    Py_XDECREF(tag);
    return decoded;
}

/* Steps an env; new reference to its info. */
static PyObject *
step_slot(Stepper *self, Side *side, Py_ssize_t slot, PyObject *actions)
{
    PyObject *call = PySequence_GetItem(self->calls, slot), *info = NULL;
    PyObject *action = self->verbatim ? Py_NewRef(actions) : PySequence_GetItem(actions, slot);
    PyObject *result = call == NULL || action == NULL ? NULL : PyObject_CallOneArg(call, action);
    Outcome outcome = result == NULL ? FAILED : write_row(self, side, slot, result);
    if (outcome == DONE) {
        info = Py_NewRef(PyTuple_GET_ITEM(result, 4));
    }
    else if (outcome == LEFT) {
        PyObject *index = PyLong_FromSsize_t(slot);
        info = index == NULL ? NULL : PyObject_CallFunctionObjArgs(self->rest, side->side, index, result, NULL);
        Py_XDECREF(index);
    }
    Py_XDECREF(call);
    Py_XDECREF(action);
    Py_XDECREF(result);
    return info;
}

/* Notes the info of a slot; takes the reference. */
static int
note_info(Stepper *self, Beside *beside, Py_ssize_t slot, PyObject *info)
{
    int failed = 0, is_some = PyDict_CheckExact(info) ? PyDict_GET_SIZE(info) > 0 : PyObject_IsTrue(info);
    if (is_some > 0) {
        if (beside->infos == NULL && beside->taken == slot && PyDict_CheckExact(info) &&
            take_numbers(&self->infos, slot, info)) {
            beside->taken++;
        }
        else {
            failed = begin_beside(self, beside) < 0 ||
                     append_info(beside->infos, slot, PyObject_CallOneArg(self->take_info, info)) < 0;
        }
    }
    Py_DECREF(info);
    return is_some < 0 || failed ? -1 : 0;
}

/* Notes the error of a slot; that of a single env is the answer to the request. */
static int
note_error(Stepper *self, Side *side, Beside *beside, Py_ssize_t slot)
{
    PyObject *error = self->verbatim ? NULL : taken_exception();
    if (error == NULL) {
        return -1;
    }
    PyObject *index = PyLong_FromSsize_t(slot);
    int failed = index == NULL || begin_beside(self, beside) < 0 ||
                 called(PyObject_CallFunctionObjArgs(self->note_error, side->side, index, error, beside->infos,
                                                     beside->failures, NULL)) < 0;
    Py_DECREF(error);
    Py_XDECREF(index);
    return failed ? -1 : 0;
}

static int
answer(Stepper *self, Side *side, PyObject *number, int64_t request, Beside *beside)
{
    if (beside->infos == NULL && beside->taken && beside->taken < self->slots && begin_beside(self, beside) < 0) {
        return -1;
    }
    long flags = PyLong_AsLong(*side->reply_flags);
    if (flags == -1 && PyErr_Occurred()) {
        return -1;
    }
    int is_more = beside->infos != NULL && (PyList_GET_SIZE(beside->infos) || PyDict_GET_SIZE(beside->failures));
    if (is_more || PyDict_GET_SIZE(self->generators) || flags & PICKLED_ROWS) {
        if (begin_beside(self, beside) < 0 ||
            called(PyObject_CallFunctionObjArgs(self->finish, number, side->side, beside->infos, beside->failures,
                                                NULL)) < 0) {
            return -1;
        }
        return learn_from_packer(self);
    }
    if (flags) {
        ((unsigned char *)side->bank.buf)[3] = (unsigned char)flags;
    }
    if (side->digest != Py_None && called(PyObject_CallNoArgs(side->digest)) < 0) {
        return -1;
    }
    if (beside->taken) {
        return write_numbers(self, side, number, request);
    }
    write_no_payload(self, request);
    return 0;
}

static PyObject *
step_once(Stepper *self, PyObject *number)
{
    long long request = PyLong_AsLongLong(number);
    if (request == -1 && PyErr_Occurred()) {
        return NULL;
    }
    Side *side = &self->sides[request & 1];
    unsigned char *bank = side->bank.buf;
    if (bank[0] != STEP || bank[1] & SKIPPED || (bank[1] < ARRAY && !self->verbatim)) {
        return PyObject_CallOneArg(self->reference, number);
    }
    _Atomic int64_t *words = ((Words *)self->words)->words;
    atomic_store(&words[BUSY], request);
    memset(bank + side->flags, 0, side->unset);
    Beside beside = {0};
    PyObject *zero = PyLong_FromLong(0), *actions = NULL;
    int failed = zero == NULL;
    if (!failed) {
        put(side->reply_flags, zero);
        failed = (actions = actions_of(self, number, bank)) == NULL;
    }
    for (Py_ssize_t slot = 0; slot < self->slots && !failed; slot++) {
        atomic_store(&words[SLOT], slot + 1);
        PyObject *info = step_slot(self, side, slot, actions);
        if (info == NULL || note_info(self, &beside, slot, info) < 0) {
            failed = note_error(self, side, &beside, slot) < 0;
        }
    }
    failed = failed || answer(self, side, number, request, &beside) < 0;
    failed = failed && answer_failed(self, number) < 0;
    Py_XDECREF(zero);
    Py_XDECREF(actions);
    Py_XDECREF(beside.infos);
    Py_XDECREF(beside.failures);
    if (failed) {
        return NULL;
    }
    atomic_store(&words[SLOT], 0);
    atomic_store(&words[BUSY], 0);
    Py_RETURN_NONE;
}

static int
stepper_traverse(Stepper *self, visitproc visit, void *arg)
{
    STEPPER(VISIT_MEMBER)
    for (int side = 0; side < 2; side++) {
        Py_VISIT(self->sides[side].cells);
        Py_VISIT(self->sides[side].digest);
        Py_VISIT(self->sides[side].side);
    }
    return 0;
}

static int
stepper_clear(Stepper *self)
{
    STEPPER(CLEAR_MEMBER)
    for (int each = 0; each < 2; each++) {
        Side *side = &self->sides[each];
        Py_CLEAR(side->cells);
        Py_CLEAR(side->key);
        Py_CLEAR(side->digest);
        Py_CLEAR(side->side);
        Py_CLEAR(side->dtype);
        PyBuffer_Release(&side->bank);
        PyBuffer_Release(&side->area);
        PyBuffer_Release(&side->whole);
    }
    forget_infos(&self->infos);
    return 0;
}

static int
take_side(Side *side, PyObject *given, Py_ssize_t slots)
{
    PyObject *bank, *area, *whole, *view = NULL, *layout = NULL;
    if (!PyArg_ParseTuple(given, "OOOO!OOO", &bank, &area, &whole, &PyList_Type, &side->cells, &side->key,
                          &side->digest, &side->side)) {
        side->cells = side->key = side->digest = side->side = NULL;
        return -1;
    }
    Py_INCREF(side->cells);
    Py_INCREF(side->key);
    Py_INCREF(side->digest);
    Py_INCREF(side->side);
    int failed = (view = PyObject_GetAttr(bank, s_view)) == NULL ||
                 (layout = PyObject_GetAttr(bank, s_layout)) == NULL ||
                 PyObject_GetBuffer(view, &side->bank, PyBUF_WRITABLE) < 0 ||
                 PyObject_GetBuffer(area, &side->area, PyBUF_WRITABLE) < 0 ||
                 number_at(layout, "rewards", &side->rewards) < 0 ||
                 number_at(layout, "terminated", &side->flags) < 0 ||
                 number_at(layout, "shown", &side->unset) < 0 ||
                 (side->reply_flags = place_named(side->side, "flags")) == NULL;
    side->unset -= side->flags;
    if (!failed && whole != Py_None) {
        failed = (side->dtype = PyObject_GetAttr(whole, s_dtype)) == NULL ||
                 PyObject_GetBuffer(whole, &side->whole, PyBUF_ND | PyBUF_WRITABLE) < 0;
    }
    Py_XDECREF(view);
    Py_XDECREF(layout);
    if (failed) {
        return -1;
    }
    if (side->rewards < HEAD || side->rewards + 8 * slots > side->bank.len || side->flags < HEAD ||
        side->unset < 3 * slots || side->flags + side->unset > side->bank.len || PyList_GET_SIZE(side->cells) != slots ||
        (side->whole.buf != NULL && (side->whole.ndim < 1 || side->whole.shape[0] != slots))) {
        PyErr_SetString(PyExc_ValueError, "a bank has a place for each slot");
        return -1;
    }
    return 0;
}

static PyObject *
stepper_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *sides = kwargs == NULL ? NULL : PyDict_GetItemString(kwargs, "sides");
    if (learn_names() < 0) {
        return NULL;
    }
    if (PyTuple_GET_SIZE(args) || sides == NULL || !PyTuple_CheckExact(sides) || PyTuple_GET_SIZE(sides) != 2) {
        return PyErr_Format(PyExc_TypeError, "a stepper is made of names and their values");
    }
    Stepper *self = (Stepper *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->infos.count = -1;
#define TAKE_MEMBER(word) self->word = Py_XNewRef(PyDict_GetItemString(kwargs, #word));
    STEPPER(TAKE_MEMBER)
#define IS_MISSING(word) || self->word == NULL
    if (0 STEPPER(IS_MISSING) || !Py_IS_TYPE(self->words, &WordsType) || ((Words *)self->words)->count <= SLOT ||
        !PyList_CheckExact(self->calls) || !PyDict_CheckExact(self->generators)) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_TypeError, "that is not what a stepper is made of");
    }
    self->slots = PyList_GET_SIZE(self->calls);
    self->verbatim = self->is_verbatim == Py_True && self->slots == 1;
    for (int side = 0; side < 2; side++) {
        if (take_side(&self->sides[side], PyTuple_GET_ITEM(sides, side), self->slots) < 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return (PyObject *)self;
}

static PyObject *
stepper_call(Stepper *self, PyObject *args, PyObject *kwargs)
{
    PyObject *number;
    if (!PyArg_ParseTuple(args, "O!", &PyLong_Type, &number)) {
        return NULL;
    }
    return step_once(self, number);
}

static PyTypeObject StepType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multienv._engine._native.Step",
    .tp_doc = PyDoc_STR("Executes a request; see worker/stepper.py."),
    .tp_basicsize = sizeof(Stepper),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = stepper_new,
    .tp_traverse = (traverseproc)stepper_traverse,
    .tp_clear = (inquiry)stepper_clear,
    .tp_dealloc = clear_and_free,
    .tp_call = (ternaryfunc)stepper_call,
};

PyDoc_STRVAR(serve_doc, "serve(words, handle, last, untimed, seconds, forks, wake)\n--\n\n\
Execute steps as they come, until another request than a step comes, or a step that is to be timed, or none within so\n\
many seconds; return the last number executed.");

static PyObject *
serve(PyObject *module, PyObject *args)
{
    Words *words;
    PyObject *handle, *forks, *wake;
    long long last, untimed;
    double seconds;
    if (!PyArg_ParseTuple(args, "O!OLLdOO", &WordsType, &words, &handle, &last, &untimed, &seconds, &forks, &wake)) {
        return NULL;
    }
    if (learn_names() < 0) {
        return NULL;
    }
    int serves = Py_IS_TYPE(handle, &StepType);
    while (differs(words, REQUEST, last, seconds) && serves) {
        int64_t request = atomic_load(&words->words[REQUEST]);
        unsigned char *bank = ((Stepper *)handle)->sides[request & 1].bank.buf;
        if (!(request & untimed) || bank[0] != STEP) {
            break;
        }
        PyObject *number = PyLong_FromLongLong(request);
        PyObject *result = number == NULL ? NULL : step_once((Stepper *)handle, number);
        PyObject *is_astray = result == NULL ? NULL : PyObject_GetAttr(forks, s_is_astray);
        Py_XDECREF(result);
        if (is_astray == NULL || is_astray != Py_False) { /* a child that the env has forked does not answer */
            Py_XDECREF(number);
            Py_XDECREF(is_astray);
            return is_astray == NULL ? NULL : PyLong_FromLongLong(last);
        }
        Py_DECREF(is_astray);
        last = request;
        atomic_store(&words->words[REPLY], request);
        int failed = atomic_load(&words->words[TRAINER_SLEEPS]) && called(PyObject_CallNoArgs(wake)) < 0;
        Py_DECREF(number);
        if (failed) {
            return NULL;
        }
    }
    return PyLong_FromLongLong(last);
}

/* --- digests ------------------------------------------------------------------------------------------------------ */

#define BLOCK_WORDS 128
static uint64_t keys[BLOCK_WORDS];

static inline uint64_t
mixed(uint64_t word)
{
    word = (word ^ word >> 32) * 0xBF58476D1CE4E5B9u;
    return word ^ word >> 32;
}

/* Wider vectors where the processor has them: with those that every x86-64 has, it takes twice as long. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static uint64_t
block_sum(const unsigned char *block)
{
    uint64_t sum = 0;
    for (int place = 0; place < BLOCK_WORDS; place++) { /* compilers make vector instructions of it */
        uint64_t word, keyed;
        memcpy(&word, block + 8 * place, 8);
        keyed = word ^ keys[place];
        sum += (keyed & 0xFFFFFFFFu) * (keyed >> 32) + word;
    }
    return mixed(sum);
}

static uint64_t
row_digest(const unsigned char *row, Py_ssize_t width)
{
    const Py_ssize_t size = 8 * BLOCK_WORDS;
    const uint64_t next = 0xD6E8FEB86659FD93u;
    uint64_t total = 0;
    for (; width >= size; row += size, width -= size) {
        total = total * next + block_sum(row);
    }
    if (width > 0) {
        unsigned char rest[8 * BLOCK_WORDS] = {0};
        memcpy(rest, row, (size_t)width);
        total = total * next + block_sum(rest);
    }
    return total;
}

PyDoc_STRVAR(write_digests_doc, "write_digests(shown, *leaves)\n--\n\n\
Write a digest of each slot's observation to the numbers in shown; each leaf has a row of bytes for each slot.");

static PyObject *
write_digests(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer shown, leaf;
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "write_digests() wants the place of the digests first");
        return NULL;
    }
    if (PyObject_GetBuffer(args[0], &shown, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    Py_ssize_t slots = shown.len / 8;
    memset(shown.buf, 0, (size_t)shown.len);
    for (Py_ssize_t each = 1; each < count; each++) {
        if (PyObject_GetBuffer(args[each], &leaf, PyBUF_SIMPLE) < 0) {
            PyBuffer_Release(&shown);
            return NULL;
        }
        Py_ssize_t width = slots ? leaf.len / slots : 0;
        for (Py_ssize_t slot = 0; slot < slots; slot++) {
            uint64_t total;
            memcpy(&total, (char *)shown.buf + 8 * slot, 8);
            total = total * 0xD6E8FEB86659FD93u + row_digest((unsigned char *)leaf.buf + slot * width, width);
            memcpy((char *)shown.buf + 8 * slot, &total, 8);
        }
        PyBuffer_Release(&leaf);
    }
    PyBuffer_Release(&shown);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(watch_audit_events_doc, "watch_audit_events(heard): see worker/census.py. Other events cost a comparison.");
static int
hear_audit_event(const char *event, PyObject *arguments, void *heard)
{
    if (strcmp(event, "open") && strncmp(event, "os.", 3) && strncmp(event, "socket.", 7) &&
        strncmp(event, "subprocess.", 11) && strncmp(event, "sqlite3.", 8)) {
        return 0;
    }
    PyObject *done = PyObject_CallFunction(heard, "sO", event, arguments);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}
static PyObject *
watch_audit_events(PyObject *Py_UNUSED(module), PyObject *heard)
{
    if (PySys_AddAuditHook(hear_audit_event, Py_NewRef(heard)) < 0) { /* a hook is never taken out again */
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"send_plain", send_plain, METH_VARARGS, send_plain_doc},
    {"collect_plain", collect_plain, METH_VARARGS, collect_plain_doc},
    {"take_answered", take_answered, METH_O, take_answered_doc},
    {"awaits_on", awaits_on, METH_VARARGS, awaits_on_doc},
    {"follow", follow, METH_O, follow_doc},
    {"serve", serve, METH_VARARGS, serve_doc},
    {"watch_audit_events", watch_audit_events, METH_O, watch_audit_events_doc},
    {"write_digests", (PyCFunction)(void (*)(void))write_digests, METH_FASTCALL, write_digests_doc},
    {NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "multienv._engine._native",
    .m_doc = PyDoc_STR("The loops of a plain step in native code; see _native.c."),
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__native(void)
{
#define INTERN_NAME(word)                                                                                              \
    if ((s_##word = PyUnicode_InternFromString(#word)) == NULL) {                                                      \
        return NULL;                                                                                                   \
    }
    for (uint64_t place = 0; place < BLOCK_WORDS; place++) {
        keys[place] = mixed((place + 1) * 0x9E3779B97F4A7C15u);
    }
    NAMES(INTERN_NAME)
    CONSTANTS(INTERN_NAME)
    f_buffers.name = PyUnicode_InternFromString("buffers");
    f_lock.name = PyUnicode_InternFromString("lock");
    if (f_buffers.name == NULL || f_lock.name == NULL) {
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    PyTypeObject *types[] = {&WordsType, &PartsType, &HotType, &StepType};
    for (size_t each = 0; each < sizeof types / sizeof *types; each++) {
        if (module != NULL && PyModule_AddType(module, types[each]) < 0) {
            Py_CLEAR(module);
        }
    }
    return module;
}
