/* A plain step in native code, and control words with real acquire and release.

The Python code is the reference, line for line:

    Words           control words                       a memoryview
    Parts, ask      the trainer's requests              recovery/hot_path.py
    Integers        an action that is an integer        wire/actions.py
    Reader, take    the trainer's answers               wire/codecs.py, recovery/hot_path.py
    RowsStep        a worker's step of several envs     worker/rows.py
    ExactStep       a worker's step of one env          worker/exact.py
    serve           a worker's loop                     worker/main.py
    write_digests   digests of observations             wire/digests.py

This file knows segments, words, records and buffers. States, policies and errors stay Python: whatever is not plain is
left to the reference, for one worker or one result at a time.

No signal handler of Python's runs inside these functions but where they call Python.
*/
#define _GNU_SOURCE /* sched_getcpu */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <sched.h>
#include <stdatomic.h>
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

static Py_ssize_t
words_length(Words *self)
{
    return self->count;
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
    .mp_length = (lenfunc)words_length,
    .mp_subscript = (binaryfunc)words_get,
    .mp_ass_subscript = (objobjargproc)words_set,
};
static PyBufferProcs words_as_buffer = {.bf_getbuffer = (getbufferproc)words_buffer};
static PyTypeObject WordsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multienv._native.Words",
    .tp_doc = PyDoc_STR("Words(memory)\n--\n\nThe control words in a memory, as integers of 64 bits."),
    .tp_basicsize = sizeof(Words),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = words_new,
    .tp_dealloc = (destructor)words_dealloc,
    .tp_as_mapping = &words_mapping,
    .tp_as_buffer = &words_as_buffer,
};

/* --- objects and names of the reference --------------------------------------------------------------------------- */

/* Attributes of the objects that the reference works on. Where a class has one of them in its __slots__ it is read and
   written in its place, which is a tenth of what looking it up takes. */
typedef struct {
    PyObject *name;
    PyTypeObject *type; /* of the last object that had it in a slot */
    Py_ssize_t offset;
} Field;

#define FIELDS(X)                                                                                                      \
    X(after) X(answers) X(asked_by) X(buffers) X(columns) X(elements) X(encode) X(entries) X(flags) X(is_due)          \
    X(journal) X(last_answer) X(limit) X(lock) X(looks) X(maintenance) X(meanings) X(number) X(pending) X(position)    \
    X(read) X(recording) X(records) X(recycling) X(rows) X(seen) X(started) X(state) X(step_limit) X(steps) X(until)    \
    X(wanted) X(words)
#define NAMES(X)                                                                                                       \
    X(acquire) X(columns) X(dtype) X(is_answered) X(is_astray) X(layout) X(look_at_limits) X(note_beginning)           \
    X(note_ends) X(note_starts) X(release) X(rewards) X(ring) X(rows) X(shown) X(terminated) X(view)    \
    X(with_infos)
#define CONSTANTS(X) X(LOOKING) X(MISSING) X(MultienvError) X(RUNNING) X(SAMPLE) X(monotonic) X(_BEGINS) X(_PATIENCE)

#define DECLARE_FIELD(word) static Field f_##word;
#define DECLARE_NAME(word) static PyObject *s_##word;
FIELDS(DECLARE_FIELD)
NAMES(DECLARE_NAME)
CONSTANTS(DECLARE_NAME)

/* Learns where objects of this type have a field. */
static int
find_slot(PyObject *object, Field *field)
{
    PyObject *found = PyObject_GetAttr((PyObject *)Py_TYPE(object), field->name);
    if (found == NULL) {
        PyErr_Clear(); /* it has none in its class; whatever else this is comes again when it is read */
        return 0;
    }
    int is_slot = Py_IS_TYPE(found, &PyMemberDescr_Type) && PyType_IsSubtype(Py_TYPE(object), PyDescr_TYPE(found));
    if (is_slot) {
        PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        is_slot = member->type == T_OBJECT_EX && !(member->flags & READONLY);
        if (is_slot) {
            field->offset = member->offset;
            Py_XSETREF(field->type, (PyTypeObject *)Py_NewRef(Py_TYPE(object)));
        }
    }
    Py_DECREF(found);
    return is_slot;
}

static inline PyObject **
slot_of(PyObject *object, Field *field)
{
    return (PyObject **)((char *)object + field->offset);
}

/* New reference. */
static PyObject *
get(PyObject *object, Field *field)
{
    if (Py_IS_TYPE(object, field->type) || find_slot(object, field)) {
        PyObject *value = *slot_of(object, field);
        if (value != NULL) {
            return Py_NewRef(value);
        }
    }
    return PyObject_GetAttr(object, field->name);
}

static int
put(PyObject *object, Field *field, PyObject *value)
{
    if (Py_IS_TYPE(object, field->type) || find_slot(object, field)) {
        Py_XSETREF(*slot_of(object, field), Py_NewRef(value));
        return 0;
    }
    return PyObject_SetAttr(object, field->name, value);
}

/* The names of recovery/hot_path.py. Constants are looked up there in each call, as the reference does. */
static PyObject *reference;
static Py_ssize_t REQUEST, REPLY, REPLY_PAYLOAD, WORKER_SLEEPS;

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
get_number(PyObject *object, Field *field, long long *number)
{
    PyObject *found = get(object, field);
    if (found == NULL) {
        return -1;
    }
    *number = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static int
get_truth(PyObject *object, Field *field)
{
    PyObject *found = get(object, field);
    if (found == NULL) {
        return -1;
    }
    int is_true = PyObject_IsTrue(found);
    Py_DECREF(found);
    return is_true;
}

/* Whether a field holds this very object. */
static int
is_here(PyObject *object, Field *field, PyObject *expected)
{
    PyObject *found = get(object, field);
    if (found == NULL) {
        return -1;
    }
    Py_DECREF(found);
    return found == expected;
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

/* Names of multienv.wire, and types of numpy, learned when they are first needed. */
static Py_ssize_t STEP, SKIPPED, INT, ARRAY, SLOT, BUSY, TRAINER_SLEEPS;
static PyTypeObject *ndarray, *float64;

/* Learns numbers and types by their names. */
static int
learn_names(void)
{
    struct { const char *module, *name; Py_ssize_t *place; } numbers[] = {
        {"multienv.wire.banks", "STEP", &STEP},           {"multienv.wire.banks", "SKIPPED", &SKIPPED},
        {"multienv.wire.actions", "INT", &INT},           {"multienv.wire.actions", "ARRAY", &ARRAY},
        {"multienv.wire.segment", "SLOT", &SLOT},         {"multienv.wire.segment", "BUSY", &BUSY},
        {"multienv.wire.segment", "REQUEST", &REQUEST},   {"multienv.wire.segment", "REPLY", &REPLY},
        {"multienv.wire.segment", "REPLY_PAYLOAD", &REPLY_PAYLOAD},
        {"multienv.wire.segment", "WORKER_SLEEPS", &WORKER_SLEEPS},
        {"multienv.wire.segment", "TRAINER_SLEEPS", &TRAINER_SLEEPS},
    };
    struct { const char *name; PyTypeObject **place; } types[] = {{"float64", &float64}, {"ndarray", &ndarray}};
    if (ndarray != NULL) {
        return 0;
    }
    for (size_t each = 0; each < sizeof numbers / sizeof *numbers; each++) {
        PyObject *module = PyImport_ImportModule(numbers[each].module);
        PyObject *found = module == NULL ? NULL : PyObject_GetAttrString(module, numbers[each].name);
        *numbers[each].place = found == NULL ? -1 : PyLong_AsSsize_t(found);
        Py_XDECREF(module);
        Py_XDECREF(found);
        if (PyErr_Occurred()) {
            return -1;
        }
    }
    for (size_t each = 0; each < sizeof types / sizeof *types; each++) {
        PyObject *numpy = PyImport_ImportModule("numpy");
        PyObject *found = numpy == NULL ? NULL : PyObject_GetAttrString(numpy, types[each].name);
        Py_XDECREF(numpy);
        if (found == NULL) {
            return -1;
        }
        *types[each].place = (PyTypeObject *)found;
    }
    return 0;
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
parts_item(Parts *self, Py_ssize_t place)
{
    if (place < 0 || place >= PyTuple_GET_SIZE(self->cuts)) {
        PyErr_SetString(PyExc_IndexError, "there is no such part");
        return NULL;
    }
    return PyObject_GetItem(self->array, PyTuple_GET_ITEM(self->cuts, place));
}

/* Writes a part into a bank, if it has so many numbers; whether it did. */
static int
write_part(Parts *self, Py_ssize_t place, long long numbers, int64_t request, Py_buffer *record)
{
    Py_ssize_t start, stop, step;
    if (place < 0 || place >= PyTuple_GET_SIZE(self->cuts) || self->view.ndim < 1 ||
        PySlice_Unpack(PyTuple_GET_ITEM(self->cuts, place), &start, &stop, &step) < 0) {
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

static PySequenceMethods parts_sequence = {
    .sq_length = (lenfunc)parts_length,
    .sq_item = (ssizeargfunc)parts_item,
};
static PyTypeObject PartsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multienv._native.Parts",
    .tp_doc = PyDoc_STR("Parts(array, cuts, head)\n--\n\nA batch of actions, cut into one part for each worker."),
    .tp_basicsize = sizeof(Parts),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = parts_new,
    .tp_dealloc = (destructor)parts_dealloc,
    .tp_as_sequence = &parts_sequence,
};

/* The two records of a channel as a tuple, if each is a memoryview of so many bytes at the least; new reference. */
static PyObject *
checked_records(PyObject *given, Py_ssize_t least)
{
    PyObject *records = PySequence_Tuple(given);
    int fits = records != NULL && PyTuple_GET_SIZE(records) == 2;
    for (Py_ssize_t side = 0; fits && side < 2; side++) {
        PyObject *record = PyTuple_GET_ITEM(records, side);
        fits = PyMemoryView_Check(record) && PyMemoryView_GET_BUFFER(record)->len >= least;
    }
    if (records != NULL && !fits) {
        Py_CLEAR(records);
        PyErr_SetString(PyExc_TypeError, "a channel has two records, each long enough");
    }
    return records;
}

static char *
bank_of(PyObject *records, int64_t request)
{
    return PyMemoryView_GET_BUFFER(PyTuple_GET_ITEM(records, request & 1))->buf;
}

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
    if (!PyTuple_CheckExact(columns) || PyTuple_GET_SIZE(columns) != 4) {
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
    for (Py_ssize_t place = 0; PyDict_Next(info, &iteration, &name, &value); place++, cell += 8) {
        PyObject *expected = PyTuple_GET_ITEM(names, place);
        if (((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(types, place)) ||
            (name != expected && (!PyUnicode_CheckExact(name) || PyUnicode_Compare(name, expected) != 0)) ||
            lay_out(infos->formats[place], value, cell) != DONE) {
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
    for (Py_ssize_t place = 0; info != NULL && place < infos->count; place++, cell += 8) {
        double real;
        float small;
        int64_t number;
        int32_t integer;
        memcpy(&real, cell, sizeof real);
        memcpy(&small, cell, sizeof small);
        memcpy(&number, cell, sizeof number);
        memcpy(&integer, cell, sizeof integer);
        char format = infos->formats[place];
        PyObject *type = PyTuple_GET_ITEM(PyTuple_GET_ITEM(infos->columns, 1), place);
        PyObject *value = format == 'd'   ? PyFloat_FromDouble(real)
                          : format == 'f' ? PyFloat_FromDouble(small)
                          : format == '?' ? PyBool_FromLong(*cell)
                                          : PyLong_FromLongLong(format == 'i' ? integer : number);
        if (value != NULL && (PyObject *)Py_TYPE(value) != type) {
            Py_SETREF(value, PyObject_CallOneArg(type, value));
        }
        if (value == NULL || PyDict_SetItem(info, PyTuple_GET_ITEM(names, place), value) < 0) {
            Py_CLEAR(info);
        }
        Py_XDECREF(value);
    }
    return info;
}

/* Whether payload of this length lies in its place and begins with the head. */
static int
begins_with(Py_buffer *place, Py_ssize_t length, PyObject *head)
{
    Py_ssize_t size = PyBytes_GET_SIZE(head);
    return length <= place->len && size <= length && memcmp(place->buf, PyBytes_AS_STRING(head), size) == 0;
}

/* Takes the two places where payload lies. */
static int
take_places(PyObject *given, Py_buffer places[2])
{
    for (int side = 0; side < 2; side++) {
        PyObject *place = PySequence_GetItem(given, side);
        int failed = place == NULL || PyObject_GetBuffer(place, &places[side], PyBUF_SIMPLE) < 0;
        Py_XDECREF(place);
        if (failed) {
            return -1;
        }
    }
    return 0;
}

/* --- single envs -----------------------------------------------------------------------------------------------------

What is written for an action that is an integer, and read of an answer that ends nothing. All else is left to the
functions of the reference, which they are made with. None of these objects is in a cycle: nothing that they have knows
them. */

typedef struct {
    PyObject_HEAD
    PyObject *otherwise, *records;
    PyTypeObject *int64;
    unsigned long long head, head_of_int64;
} Integers;

static PyTypeObject IntegersType;

/* Writes an action; LEFT: it is for `otherwise` to write. */
static Outcome
write_integer(Integers *self, int64_t request, PyObject *action)
{
    long long value;
    uint64_t head[2] = {self->head, (uint32_t)request};
    if (PyLong_CheckExact(action)) {
        int overflow;
        value = PyLong_AsLongLongAndOverflow(action, &overflow);
        if (overflow) {
            return LEFT;
        }
    }
    else if (Py_IS_TYPE(action, self->int64)) {
        value = PyLong_AsLongLong(action);
        head[0] = self->head_of_int64;
    }
    else {
        return LEFT;
    }
    if (value == -1 && PyErr_Occurred()) {
        return FAILED;
    }
    char *bank = bank_of(self->records, request);
    memcpy(bank, head, sizeof head);
    memcpy(bank + HEAD, &value, sizeof value);
    return DONE;
}

static PyObject *
integers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *otherwise, *records, *int64;
    unsigned long long head, head_of_int64;
    if (!PyArg_ParseTuple(args, "OOO!KK", &otherwise, &records, &PyType_Type, &int64, &head, &head_of_int64)) {
        return NULL;
    }
    if ((records = checked_records(records, HEAD + sizeof(int64_t))) == NULL) {
        return NULL;
    }
    Integers *self = (Integers *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(records);
    }
    else {
        self->otherwise = Py_NewRef(otherwise);
        self->records = records;
        self->int64 = (PyTypeObject *)Py_NewRef(int64);
        self->head = head;
        self->head_of_int64 = head_of_int64;
    }
    return (PyObject *)self;
}

static void
integers_dealloc(Integers *self)
{
    Py_XDECREF(self->otherwise);
    Py_XDECREF(self->records);
    Py_XDECREF(self->int64);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
integers_call(Integers *self, PyObject *args, PyObject *kwargs)
{
    long long request;
    PyObject *action;
    if (!PyArg_ParseTuple(args, "LO", &request, &action)) {
        return NULL;
    }
    switch (write_integer(self, request, action)) {
    case DONE:
        Py_RETURN_NONE;
    case LEFT:
        return PyObject_Call(self->otherwise, args, kwargs);
    default:
        return NULL;
    }
}

static PyTypeObject IntegersType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multienv._native.Integers",
    .tp_doc = PyDoc_STR("Integers(otherwise, records, int64, head, head_of_int64)\n--\n\n\
Writes a step whose action is an integer into its bank."),
    .tp_basicsize = sizeof(Integers),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = integers_new,
    .tp_dealloc = (destructor)integers_dealloc,
    .tp_call = (ternaryfunc)integers_call,
};

typedef struct {
    PyObject_HEAD
    PyObject *otherwise, *looks, *records; /* looks: each returns a copy of the observation in a bank */
    PyObject *described;                   /* tells what infos of numbers a payload has */
    Words *words;
    Py_buffer places[2];
    Infos infos;
    Py_ssize_t reward;
} Reader;

static PyTypeObject ReaderType;

/* The info in the payload; None: it is pickled; NULL without an exception: it is for `otherwise` to read. */
static PyObject *
read_info(Reader *self, int64_t request)
{
    Py_ssize_t length = atomic_load(&self->words->words[REPLY_PAYLOAD + (request & 1)]);
    if (length == 0) {
        return PyDict_New();
    }
    Py_buffer *place = &self->places[request & 1];
    Infos *infos = &self->infos;
    if (length > place->len) {
        return NULL;
    }
    if (*(char *)place->buf != NUMBERS) {
        return Py_NewRef(Py_None);
    }
    if (infos->count < 0 || !begins_with(place, length, PyTuple_GET_ITEM(infos->columns, 3))) {
        PyObject *columns = PyObject_CallFunction(self->described, "y#", place->buf, length);
        int failed = columns == NULL || learn_infos(infos, columns, 1) < 0;
        Py_XDECREF(columns);
        if (failed || infos->count < 0) {
            return NULL;
        }
    }
    Py_ssize_t begin = PyBytes_GET_SIZE(PyTuple_GET_ITEM(infos->columns, 3));
    if (length - begin != 8 * infos->count) {
        return NULL;
    }
    memcpy(infos->numbers, (char *)place->buf + begin, length - begin);
    return given_back(infos, 0);
}

static PyObject *
read_reply(Reader *self, PyObject *number, int64_t request)
{
    const unsigned char *bank = (unsigned char *)bank_of(self->records, request);
    double reward;
    int is_plain = bank[3] == 0 && bank[4] <= 1; /* ends nothing; its reward is a float, or of numpy's */
    memcpy(&reward, bank + self->reward, sizeof reward);
    PyObject *info = is_plain ? read_info(self, request) : NULL;
    if (info == NULL) {
        return PyErr_Occurred() ? NULL : PyObject_CallOneArg(self->otherwise, number);
    }
    if (info == Py_None) {
        return info;
    }
    PyObject *look = PySequence_GetItem(self->looks, request & 1);
    PyObject *observation = look == NULL ? NULL : PyObject_CallNoArgs(look);
    PyObject *number_of_reward = PyFloat_FromDouble(reward), *transition = NULL;
    if (bank[4] == 1 && observation != NULL && number_of_reward != NULL) {
        Py_SETREF(number_of_reward, PyObject_CallOneArg((PyObject *)float64, number_of_reward));
    }
    if (observation != NULL && number_of_reward != NULL) {
        transition = PyTuple_Pack(5, observation, number_of_reward, Py_False, Py_False, info);
    }
    Py_XDECREF(look);
    Py_XDECREF(observation);
    Py_XDECREF(number_of_reward);
    Py_DECREF(info);
    return transition;
}

static PyObject *
reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *otherwise, *looks, *records, *words, *places, *described;
    Py_ssize_t reward;
    if (learn_names() < 0 || !PyArg_ParseTuple(args, "OOOnO!OO", &otherwise, &looks, &records, &reward, &WordsType,
                                               &words, &places, &described)) {
        return NULL;
    }
    if (reward < HEAD || (records = checked_records(records, reward + (Py_ssize_t)sizeof(double))) == NULL) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "the reward lies behind the head");
    }
    Reader *self = (Reader *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(records);
        return NULL;
    }
    self->otherwise = Py_NewRef(otherwise);
    self->looks = Py_NewRef(looks);
    self->records = records;
    self->described = Py_NewRef(described);
    self->words = (Words *)Py_NewRef(words);
    self->infos.count = -1;
    self->reward = reward;
    if (take_places(places, self->places) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void
reader_dealloc(Reader *self)
{
    Py_XDECREF(self->otherwise);
    Py_XDECREF(self->looks);
    Py_XDECREF(self->records);
    Py_XDECREF(self->described);
    Py_XDECREF(self->words);
    PyBuffer_Release(&self->places[0]);
    PyBuffer_Release(&self->places[1]);
    forget_infos(&self->infos);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
reader_call(Reader *self, PyObject *args, PyObject *kwargs)
{
    PyObject *number;
    if (!PyArg_ParseTuple(args, "O!", &PyLong_Type, &number)) {
        return NULL;
    }
    long long request = PyLong_AsLongLong(number);
    return request == -1 && PyErr_Occurred() ? NULL : read_reply(self, number, request);
}

static PyTypeObject ReaderType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multienv._native.Reader",
    .tp_doc = PyDoc_STR("Reader(otherwise, looks, records, reward, words, places, described)\n--\n\n\
Reads the transition of a single env out of its bank; `reward` is the offset of the reward."),
    .tp_basicsize = sizeof(Reader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = reader_new,
    .tp_dealloc = (destructor)reader_dealloc,
    .tp_call = (ternaryfunc)reader_call,
};

/* What several envs answered: arrays over the banks, which are the same for each answer but for their infos. */

typedef struct {
    PyObject_HEAD
    PyObject *otherwise;
    PyObject *replies, *full, *infos; /* lists, one for each bank; `full` are the replies that have the `infos` */
    PyObject *numbers_in;             /* makes infos of a payload, or returns None */
    PyObject *columns, *head;         /* of the last infos; or NULL */
    Words *words;
    Py_buffer places[2];
} RowsReader;

static PyTypeObject RowsReaderType;

static PyObject *
read_rows(RowsReader *self, PyObject *number, int64_t request)
{
    int side = request & 1;
    Py_ssize_t length = atomic_load(&self->words->words[REPLY_PAYLOAD + side]);
    if (length == 0) {
        return PySequence_GetItem(self->replies, side);
    }
    Py_buffer *place = &self->places[side];
    if (length > place->len) {
        return PyObject_CallOneArg(self->otherwise, number);
    }
    if (*(char *)place->buf != NUMBERS) { /* they are pickled */
        Py_RETURN_NONE;
    }
    if (self->head == NULL || !begins_with(place, length, self->head)) {
        PyObject *infos = PyObject_CallFunction(self->numbers_in, "y#", place->buf, length), *rows = NULL;
        if (infos == NULL || infos == Py_None) {
            return infos;
        }
        Py_CLEAR(self->head);
        Py_XSETREF(self->columns, PyObject_GetAttr(infos, s_columns));
        if (self->columns != NULL && (rows = PyObject_GetAttr(infos, s_rows)) != NULL && PyBytes_Check(rows)) {
            self->head = PyBytes_FromStringAndSize(place->buf, length - PyBytes_GET_SIZE(rows));
        }
        Py_DECREF(infos);
        Py_XDECREF(rows);
        if (self->head == NULL) {
            return NULL;
        }
    }
    Py_ssize_t begin = PyBytes_GET_SIZE(self->head);
    PyObject *infos = PySequence_GetItem(self->infos, side);
    PyObject *rows = PyBytes_FromStringAndSize((char *)place->buf + begin, length - begin);
    int failed = infos == NULL || rows == NULL || put(infos, &f_columns, self->columns) < 0 ||
                 put(infos, &f_rows, rows) < 0;
    Py_XDECREF(infos);
    Py_XDECREF(rows);
    return failed ? NULL : PySequence_GetItem(self->full, side);
}

static PyObject *
rows_reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *otherwise, *replies, *full, *infos, *words, *places, *numbers_in;
    if (learn_names() < 0 || !PyArg_ParseTuple(args, "OOOOO!OO", &otherwise, &replies, &full, &infos, &WordsType,
                                               &words, &places, &numbers_in)) {
        return NULL;
    }
    RowsReader *self = (RowsReader *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->otherwise = Py_NewRef(otherwise);
    self->replies = Py_NewRef(replies);
    self->full = Py_NewRef(full);
    self->infos = Py_NewRef(infos);
    self->numbers_in = Py_NewRef(numbers_in);
    self->words = (Words *)Py_NewRef(words);
    if (take_places(places, self->places) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void
rows_reader_dealloc(RowsReader *self)
{
    Py_XDECREF(self->otherwise);
    Py_XDECREF(self->replies);
    Py_XDECREF(self->full);
    Py_XDECREF(self->infos);
    Py_XDECREF(self->numbers_in);
    Py_XDECREF(self->columns);
    Py_XDECREF(self->head);
    Py_XDECREF(self->words);
    PyBuffer_Release(&self->places[0]);
    PyBuffer_Release(&self->places[1]);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
rows_reader_call(RowsReader *self, PyObject *args, PyObject *kwargs)
{
    PyObject *number;
    if (!PyArg_ParseTuple(args, "O!", &PyLong_Type, &number)) {
        return NULL;
    }
    long long request = PyLong_AsLongLong(number);
    return request == -1 && PyErr_Occurred() ? NULL : read_rows(self, number, request);
}

static PyTypeObject RowsReaderType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "multienv._native.RowsReader",
    .tp_doc = PyDoc_STR("RowsReader(otherwise, replies, full, infos, words, places, numbers_in)\n--\n\n\
Reads the rows of several envs, and their infos if they are numbers."),
    .tp_basicsize = sizeof(RowsReader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = rows_reader_new,
    .tp_dealloc = (destructor)rows_reader_dealloc,
    .tp_call = (ternaryfunc)rows_reader_call,
};

/* --- the hot path ------------------------------------------------------------------------------------------------- */

/* The words of a StepBuffers; new reference. */
static Words *
words_of(PyObject *buffers)
{
    PyObject *words = get(buffers, &f_words);
    if (words != NULL && !Py_IS_TYPE(words, &WordsType)) {
        Py_DECREF(words);
        PyErr_SetString(PyExc_TypeError, "the words of a channel are no Words");
        return NULL;
    }
    return (Words *)words;
}

/* A record of a StepBuffers; new reference. */
static PyObject *
record_in(PyObject *records, int64_t request)
{
    PyObject *record = PySequence_GetItem(records, request & 1);
    if (record != NULL && (!PyMemoryView_Check(record) || PyMemoryView_GET_BUFFER(record)->len < HEAD)) {
        Py_CLEAR(record);
        PyErr_SetString(PyExc_TypeError, "the records of a channel are memoryviews");
    }
    return record;
}

/* Writes the action of a member into its bank; LEFT: the supervisor refuses it. */
static Outcome
write_action(PyObject *buffers, PyObject *number, int64_t request, PyObject *actions, Py_ssize_t place)
{
    if (Py_IS_TYPE(actions, &PartsType)) {
        long long numbers;
        if (get_number(buffers, &f_elements, &numbers) < 0) {
            return FAILED;
        }
        PyObject *records = get(buffers, &f_records);
        PyObject *record = records == NULL ? NULL : record_in(records, request);
        Py_XDECREF(records);
        if (record == NULL) {
            return FAILED;
        }
        int is_written = write_part((Parts *)actions, place, numbers, request, PyMemoryView_GET_BUFFER(record));
        Py_DECREF(record);
        if (is_written) {
            return DONE;
        }
    }
    PyObject *encode = get(buffers, &f_encode);
    PyObject *action = encode == NULL ? NULL : PySequence_GetItem(actions, place);
    if (action != NULL && Py_IS_TYPE(encode, &IntegersType)) {
        Outcome outcome = write_integer((Integers *)encode, request, action);
        if (outcome != LEFT) {
            Py_DECREF(encode);
            Py_DECREF(action);
            return outcome;
        }
    }
    PyObject *arguments[] = {NULL, number, action};
    PyObject *result =
        action == NULL ? NULL : PyObject_Vectorcall(encode, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_XDECREF(encode);
    Py_XDECREF(action);
    if (called(result) == 0) {
        return DONE;
    }
    PyObject *refused = action == NULL ? NULL : constant(s_MultienvError);
    if (refused != NULL && PyErr_ExceptionMatches(refused)) { /* the supervisor raises it once more */
        PyErr_Clear();
        return LEFT;
    }
    return FAILED;
}

static Outcome
ask_one(PyObject *supervisor, PyObject *actions, Py_ssize_t place, PyObject *state, PyObject *asker)
{
    Outcome outcome = FAILED;
    PyObject *maintenance = NULL, *buffers = NULL, *pending = NULL, *number = NULL, *limit = NULL, *position = NULL;
    Words *words = NULL;
    PyObject *until = NULL;
    long long last;
    PyObject *running = constant(s_RUNNING);
    int is_running = running == NULL ? -1 : is_here(supervisor, &f_state, running);
    int is_mine = is_running < 1 ? is_running : is_here(supervisor, &f_asked_by, asker);
    if (is_mine < 1) {
        return is_mine < 0 ? FAILED : LEFT;
    }
    if ((maintenance = get(supervisor, &f_maintenance)) == NULL) {
        goto end;
    }
    int is_due = get_truth(maintenance, &f_is_due);
    if (is_due) {
        outcome = is_due < 0 ? FAILED : LEFT;
        goto end;
    }
    if ((buffers = get(supervisor, &f_buffers)) == NULL ||
        (pending = get(supervisor, &f_pending)) == NULL ||
        (words = words_of(buffers)) == NULL ||
        (limit = get(pending, &f_step_limit)) == NULL ||
        (position = get(supervisor, &f_position)) == NULL ||
        get_number(position, &f_number, &last) < 0 ||
        (number = PyLong_FromLongLong(last + 1)) == NULL) {
        goto end;
    }
    outcome = write_action(buffers, number, last + 1, actions, place);
    if (outcome != DONE) {
        goto end;
    }
    outcome = FAILED;
    double seconds = limit == Py_None ? 0.0 : PyFloat_AsDouble(limit);
    if (PyErr_Occurred()) {
        goto end;
    }
    until = limit == Py_None ? Py_NewRef(Py_None) : time_from_now(seconds);
    if (until == NULL ||
        put(pending, &f_limit, limit) < 0 ||
        put(pending, &f_until, until) < 0 ||
        put(supervisor, &f_state, state) < 0) {
        goto end;
    }
    atomic_store(&words->words[REQUEST], last + 1);
    if (atomic_load(&words->words[WORKER_SLEEPS])) {
        if (called(PyObject_CallMethodOneArg(buffers, s_ring, number)) < 0) {
            goto end;
        }
    }
    outcome = DONE;
end:
    Py_XDECREF(maintenance);
    Py_XDECREF(buffers);
    Py_XDECREF(pending);
    Py_XDECREF(position);
    Py_XDECREF(words);
    Py_XDECREF(limit);
    Py_XDECREF(number);
    Py_XDECREF(until);
    return outcome;
}

/* Looks for the reply; whether it is there. */
static int
look(Words *words, long long number, long long looks)
{
    double most;
    if (number_constant(s_LOOKING, &most) < 0) {
        return -1;
    }
    _Atomic int64_t *reply = &words->words[REPLY];
    int is_there = 0;
    Py_BEGIN_ALLOW_THREADS
    double until = now() + most;
    while (!(is_there = atomic_load(reply) == number) && looks) {
        sched_yield();
        looks = now() < until ? looks - 1 : 0;
    }
    Py_END_ALLOW_THREADS
    return is_there;
}

/* Keeps what take() shares between workers. */
typedef struct {
    PyObject *state, *until;
    int several, leaves_ends;
} Taking;

static Outcome
take_one(PyObject *supervisor, PyObject *answers, Py_ssize_t place, Taking *taking)
{
    Outcome outcome = FAILED;
    PyObject *buffers = NULL, *number = NULL, *records = NULL, *record = NULL, *meanings = NULL, *head = NULL;
    PyObject *read = NULL, *answer = NULL, *journal = NULL, *replies = NULL, *after = NULL, *position = NULL;
    Words *words = NULL;
    int is_state = is_here(supervisor, &f_state, taking->state);
    if (is_state < 1) {
        return is_state < 0 ? FAILED : LEFT;
    }
    long long last, looks;
    if ((buffers = get(supervisor, &f_buffers)) == NULL ||
        (words = words_of(buffers)) == NULL ||
        (position = get(supervisor, &f_position)) == NULL ||
        get_number(position, &f_number, &last) < 0 ||
        (number = PyLong_FromLongLong(last + 1)) == NULL) {
        goto end;
    }
    int64_t asked = last + 1;
    int side = asked & 1;
    if (get_number(buffers, &f_looks, &looks) < 0) {
        goto end;
    }
    int is_there = looks != 0 && atomic_load(&words->words[REPLY]) == asked;
    if (looks && !is_there && (is_there = look(words, asked, looks)) < 0) {
        goto end;
    }
    if (!is_there) {
        double patience;
        if (taking->several && taking->until == NULL) {
            if (number_constant(s__PATIENCE, &patience) < 0 || (taking->until = time_from_now(patience)) == NULL) {
                goto end;
            }
        }
        PyObject *until = taking->until == NULL ? Py_None : taking->until;
        PyObject *told = PyObject_CallMethodObjArgs(supervisor, s_is_answered, number, until, NULL);
        is_there = told == NULL ? -1 : PyObject_IsTrue(told);
        Py_XDECREF(told);
        if (is_there < 1) {
            outcome = is_there < 0 ? FAILED : LEFT;
            goto end;
        }
    }
    if ((records = get(buffers, &f_records)) == NULL ||
        (record = record_in(records, side)) == NULL ||
        (meanings = get(buffers, &f_meanings)) == NULL) {
        goto end;
    }
    Py_buffer *bank = PyMemoryView_GET_BUFFER(record);
    uint64_t first;
    memcpy(&first, bank->buf, sizeof first);
    if ((head = PyLong_FromUnsignedLongLong(first)) == NULL) {
        goto end;
    }
    PyObject *known = PyDict_GetItemWithError(meanings, head); /* borrowed */
    if (known == NULL) {
        outcome = PyErr_Occurred() ? FAILED : LEFT;
        goto end;
    }
    long meaning = PyLong_AsLong(known);
    int begins = known == constant(s__BEGINS);
    if (begins && atomic_load(&words->words[REQUEST]) != asked) {
        outcome = LEFT;
        goto end;
    }
    if ((read = get(buffers, &f_read)) == NULL) {
        goto end;
    }
    answer = Py_IS_TYPE(read, &ReaderType)       ? read_reply((Reader *)read, number, asked)
             : Py_IS_TYPE(read, &RowsReaderType) ? read_rows((RowsReader *)read, number, asked)
                                                 : PyObject_CallOneArg(read, number);
    if (answer == NULL) {
        goto end;
    }
    if (answer == Py_None) {
        Py_SETREF(answer, PyObject_CallMethodOneArg(supervisor, s_with_infos, number));
        if (answer == NULL || answer == Py_None) {
            outcome = answer == NULL ? FAILED : LEFT;
            goto end;
        }
    }
    if ((journal = get(position, &f_journal)) == NULL) {
        goto end;
    }
    int recording = get_truth(journal, &f_recording);
    if (recording > 0) {
        PyObject *entries = get(journal, &f_entries);
        PyObject *entry = PyBytes_FromStringAndSize(bank->buf, bank->len);
        int failed = entries == NULL || entry == NULL || PyDict_SetItem(entries, number, entry) < 0;
        Py_XDECREF(entries);
        Py_XDECREF(entry);
        recording = failed ? -1 : 1;
    }
    if (recording < 0) {
        goto end;
    }
    if (begins) {
        PyObject *pair = PyTuple_Pack(2, PyTuple_GET_ITEM(answer, 0), PyTuple_GET_ITEM(answer, 4));
        Py_SETREF(answer, pair);
        if (answer == NULL) {
            goto end;
        }
    }
    if ((replies = get(supervisor, &f_answers)) == NULL ||
        (after = get(buffers, &f_after)) == NULL) {
        goto end;
    }
    if (put(supervisor, &f_last_answer, answer) < 0 ||
        put(position, &f_seen, number) < 0 ||
        put(position, &f_number, number) < 0 ||
        put(supervisor, &f_state, PyTuple_GET_ITEM(after, meaning)) < 0) {
        goto end;
    }
    if (begins) {
        if (called(PyObject_CallMethodOneArg(supervisor, s_note_beginning, number)) < 0) {
            goto end;
        }
    }
    else {
        if (meaning && called(PyObject_CallMethodObjArgs(supervisor, s_note_ends, answer, number, NULL)) < 0) {
            goto end;
        }
        long long steps;
        if (get_number(position, &f_steps, &steps) < 0) {
            goto end;
        }
        PyObject *more = PyLong_FromLongLong(steps + 1);
        int failed = more == NULL || put(position, &f_steps, more) < 0;
        Py_XDECREF(more);
        if (failed) {
            goto end;
        }
    }
    long long started;
    double sample;
    if (get_number(replies, &f_started, &started) < 0 || number_constant(s_SAMPLE, &sample) < 0) {
        goto end;
    }
    if (started == asked) {
        if (called(PyObject_CallMethodOneArg(supervisor, s_note_starts, number)) < 0) {
            goto end;
        }
    }
    else {
        int looks_now = !(asked & (int64_t)sample);
        if (!looks_now && meaning) {
            PyObject *maintenance = get(supervisor, &f_maintenance);
            PyObject *recycling = maintenance == NULL ? NULL : get(maintenance, &f_recycling);
            looks_now = recycling == NULL ? -1 : get_truth(recycling, &f_wanted);
            Py_XDECREF(maintenance);
            Py_XDECREF(recycling);
        }
        if (looks_now < 0 || (looks_now && called(PyObject_CallMethodNoArgs(supervisor, s_look_at_limits)) < 0)) {
            goto end;
        }
    }
    if (meaning && taking->leaves_ends) {
        outcome = LEFT;
        goto end;
    }
    if (PyList_SetItem(answers, place, Py_NewRef(answer)) < 0) {
        goto end;
    }
    outcome = DONE;
end:
    Py_XDECREF(buffers);
    Py_XDECREF(words);
    Py_XDECREF(number);
    Py_XDECREF(records);
    Py_XDECREF(record);
    Py_XDECREF(meanings);
    Py_XDECREF(head);
    Py_XDECREF(read);
    Py_XDECREF(answer);
    Py_XDECREF(journal);
    Py_XDECREF(replies);
    Py_XDECREF(after);
    Py_XDECREF(position);
    return outcome;
}

/* Takes a lock; it is not held if that fails. */
static PyObject *
locked(PyObject *supervisor)
{
    PyObject *lock = get(supervisor, &f_lock);
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

PyDoc_STRVAR(ask_doc, "ask(supervisors, places, actions, state, asker, nothing=MISSING)\n--\n\n\
Do what recovery.hot_path.ask does.");

static PyObject *
ask(PyObject *module, PyObject *args)
{
    PyObject *supervisors, *given, *actions, *state, *asker, *nothing = constant(s_MISSING);
    if (nothing == NULL ||
        !PyArg_ParseTuple(args, "OOOOO|O", &supervisors, &given, &actions, &state, &asker, &nothing)) {
        return NULL;
    }
    PyObject *places = PySequence_Tuple(given);
    if (places == NULL) {
        return NULL;
    }
    Py_ssize_t done = 0;
    Outcome outcome = DONE;
    for (; done < PyTuple_GET_SIZE(places); done++) {
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(places, done));
        int is_left_alone = 0;
        if (!Py_IS_TYPE(actions, &PartsType)) {
            PyObject *action = PySequence_GetItem(actions, place);
            if (action == NULL) {
                outcome = FAILED;
                break;
            }
            is_left_alone = action == nothing;
            Py_DECREF(action);
        }
        if (is_left_alone) {
            continue;
        }
        PyObject *supervisor = PySequence_GetItem(supervisors, place);
        PyObject *lock = supervisor == NULL ? NULL : locked(supervisor);
        outcome = lock == NULL ? FAILED : ask_one(supervisor, actions, place, state, asker);
        if (lock != NULL) {
            outcome = unlocked(lock, outcome);
        }
        Py_XDECREF(supervisor);
        if (outcome != DONE) {
            break;
        }
    }
    Py_DECREF(places);
    return outcome == FAILED ? NULL : PyLong_FromSsize_t(done);
}

PyDoc_STRVAR(take_doc, "take(supervisors, places, answers, state, leaves_ends=False)\n--\n\n\
Do what recovery.hot_path.take does.");

static PyObject *
take(PyObject *module, PyObject *args)
{
    PyObject *supervisors, *given, *answers;
    Taking taking = {0};
    if (!PyArg_ParseTuple(args, "OOO!O|p", &supervisors, &given, &PyList_Type, &answers, &taking.state,
                          &taking.leaves_ends)) {
        return NULL;
    }
    PyObject *places = PySequence_Tuple(given), *missing = constant(s_MISSING);
    if (places == NULL || missing == NULL) {
        Py_XDECREF(places);
        return NULL;
    }
    int is_left = 0;
    Outcome outcome = DONE;
    taking.several = PyTuple_GET_SIZE(places) > 1;
    for (Py_ssize_t turn = PyTuple_GET_SIZE(places) - 1; turn >= 0 && outcome != FAILED; turn--) {
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(places, turn));
        PyObject *answer = PyList_GetItem(answers, place); /* borrowed */
        if (answer != missing) {
            outcome = answer == NULL ? FAILED : DONE;
            continue;
        }
        PyObject *supervisor = PySequence_GetItem(supervisors, place);
        PyObject *lock = supervisor == NULL ? NULL : locked(supervisor);
        outcome = lock == NULL ? FAILED : take_one(supervisor, answers, place, &taking);
        if (lock != NULL) {
            outcome = unlocked(lock, outcome);
        }
        Py_XDECREF(supervisor);
        is_left |= outcome == LEFT;
    }
    Py_XDECREF(taking.until);
    Py_DECREF(places);
    return outcome == FAILED ? NULL : PyBool_FromLong(is_left);
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
    Py_buffer bank, place, whole; /* place: of the payload; whole: of all observations, if they are arrays */
    PyObject *dtype, *cells, *key, *digest, *side;
    Py_ssize_t rewards, flags, unset; /* unset: bytes of flags and of digests of final observations */
} Side;

#define STEPPER(X)                                                                                                     \
    X(reference) X(rest) X(note_error) X(finish) X(fail) X(write_payload) X(take_info) X(told) X(words) X(calls)       \
    X(decode) X(packer)

typedef struct {
    PyObject_HEAD
#define DECLARE_MEMBER(word) PyObject *word;
    STEPPER(DECLARE_MEMBER)
    Side sides[2];
    Infos infos;
    Py_ssize_t slots;
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

/* Puts payload in its place: the head, and the numbers of all slots. */
static int
write_numbers(Stepper *self, Side *side, PyObject *number, int64_t request)
{
    PyObject *head = PyTuple_GET_ITEM(self->infos.columns, 3);
    Py_ssize_t length = PyBytes_GET_SIZE(head), size = 8 * self->infos.count * self->slots;
    if (length + size <= side->place.len) {
        memcpy(side->place.buf, PyBytes_AS_STRING(head), length);
        memcpy((char *)side->place.buf + length, self->infos.numbers, size);
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
    if (side->whole.buf != NULL && Py_IS_TYPE(observation, ndarray)) {
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

/* Writes what one of several envs returned; LEFT: the reference is to. */
static Outcome
write_row(Side *side, Py_ssize_t slot, PyObject *result)
{
    if (!PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 5) {
        return LEFT;
    }
    for (int flag = 2; flag < 4; flag++) {
        PyObject *value = PyTuple_GET_ITEM(result, flag);
        int is_true = value == Py_False ? 0 : PyObject_IsTrue(value);
        if (is_true) {
            return is_true < 0 ? refused() : LEFT;
        }
    }
    double reward = PyFloat_AsDouble(PyTuple_GET_ITEM(result, 1));
    if (reward == -1.0 && PyErr_Occurred()) {
        return refused();
    }
    memcpy((char *)side->bank.buf + side->rewards + 8 * slot, &reward, sizeof reward);
    return write_observation(side, slot, PyTuple_GET_ITEM(result, 0));
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

static PyObject *
done_with(Stepper *self)
{
    _Atomic int64_t *words = ((Words *)self->words)->words;
    atomic_store(&words[SLOT], 0);
    atomic_store(&words[BUSY], 0);
    Py_RETURN_NONE;
}

/* What several envs have come to besides their rows. */
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

/* Steps one of several envs; new reference to its info. */
static PyObject *
step_slot(Stepper *self, Side *side, Py_ssize_t slot, PyObject *actions)
{
    PyObject *call = PySequence_GetItem(self->calls, slot), *action = PySequence_GetItem(actions, slot), *info = NULL;
    PyObject *result = call == NULL || action == NULL ? NULL : PyObject_CallOneArg(call, action);
    Outcome outcome = result == NULL ? FAILED : write_row(side, slot, result);
    if (outcome == DONE) {
        info = Py_NewRef(PyTuple_GET_ITEM(result, 4));
    }
    else if (outcome == LEFT) {
        PyObject *place = PyLong_FromSsize_t(slot);
        info = place == NULL ? NULL : PyObject_CallFunctionObjArgs(self->rest, side->side, place, result, NULL);
        Py_XDECREF(place);
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

/* Notes the error of a slot. */
static int
note_error(Stepper *self, Side *side, Beside *beside, Py_ssize_t slot)
{
    PyObject *error = taken_exception();
    if (error == NULL) {
        return -1;
    }
    PyObject *place = PyLong_FromSsize_t(slot);
    int failed = place == NULL || begin_beside(self, beside) < 0 ||
                 called(PyObject_CallFunctionObjArgs(self->note_error, side->side, place, error, beside->infos,
                                                     beside->failures, NULL)) < 0;
    Py_DECREF(error);
    Py_XDECREF(place);
    return failed ? -1 : 0;
}

static int
rows_answered(Stepper *self, Side *side, PyObject *number, int64_t request, Beside *beside)
{
    if (beside->infos == NULL && beside->taken && beside->taken < self->slots && begin_beside(self, beside) < 0) {
        return -1;
    }
    int is_more = beside->infos != NULL && (PyList_GET_SIZE(beside->infos) || PyDict_GET_SIZE(beside->failures));
    if (is_more || PyDict_GET_SIZE(self->told)) {
        if (begin_beside(self, beside) < 0 ||
            called(PyObject_CallFunctionObjArgs(self->finish, number, side->side, beside->infos, beside->failures,
                                                NULL)) < 0) {
            return -1;
        }
        return learn_from_packer(self);
    }
    long long flags;
    if (get_number(side->side, &f_flags, &flags) < 0) {
        return -1;
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
step_rows(Stepper *self, PyObject *number, int64_t request)
{
    Side *side = &self->sides[request & 1];
    unsigned char *bank = side->bank.buf;
    if (bank[0] != STEP || bank[1] & SKIPPED || bank[1] < ARRAY) {
        return PyObject_CallOneArg(self->reference, number);
    }
    _Atomic int64_t *words = ((Words *)self->words)->words;
    atomic_store(&words[BUSY], request);
    memset(bank + side->flags, 0, side->unset);
    Beside beside = {0};
    PyObject *zero = PyLong_FromLong(0), *tag = PyLong_FromLong(bank[1]);
    PyObject *actions = NULL;
    int failed = zero == NULL || tag == NULL || put(side->side, &f_flags, zero) < 0 ||
                 (actions = PyObject_CallFunctionObjArgs(self->decode, number, tag, NULL)) == NULL;
    for (Py_ssize_t slot = 0; slot < self->slots && !failed; slot++) {
        atomic_store(&words[SLOT], slot + 1);
        PyObject *info = step_slot(self, side, slot, actions);
        if (info == NULL || note_info(self, &beside, slot, info) < 0) {
            failed = note_error(self, side, &beside, slot) < 0;
        }
    }
    failed = failed || rows_answered(self, side, number, request, &beside) < 0;
    failed = failed && answer_failed(self, number) < 0;
    Py_XDECREF(zero);
    Py_XDECREF(tag);
    Py_XDECREF(actions);
    Py_XDECREF(beside.infos);
    Py_XDECREF(beside.failures);
    return failed ? NULL : done_with(self);
}

/* Writes what the only env returned to the bit; LEFT: the reference is to. */
static Outcome
write_exactly(Stepper *self, Side *side, PyObject *number, int64_t request, PyObject *result)
{
    unsigned char *bank = side->bank.buf;
    int64_t flags;
    memcpy(&flags, bank + side->flags, sizeof flags);
    if (flags || !PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 5 ||
        PyTuple_GET_ITEM(result, 2) != Py_False || PyTuple_GET_ITEM(result, 3) != Py_False ||
        !Py_IS_TYPE(PyTuple_GET_ITEM(result, 0), ndarray)) {
        return LEFT;
    }
    PyObject *reward = PyTuple_GET_ITEM(result, 1), *info = PyTuple_GET_ITEM(result, 4);
    int is_float64 = Py_IS_TYPE(reward, float64), is_some = !PyDict_CheckExact(info) || PyDict_GET_SIZE(info);
    if (!(is_float64 || PyFloat_CheckExact(reward)) ||
        (is_some && (!PyDict_CheckExact(info) || !take_numbers(&self->infos, 0, info)))) {
        return LEFT;
    }
    Outcome outcome = write_observation(side, 0, PyTuple_GET_ITEM(result, 0));
    if (outcome != DONE) {
        return outcome;
    }
    memcpy(bank + side->rewards, &((PyFloatObject *)reward)->ob_fval, sizeof(double));
    if (is_float64) {
        bank[4] = 1; /* its place in REWARD_TYPES, see wire/codecs.py */
    }
    if (side->digest != Py_None && called(PyObject_CallNoArgs(side->digest)) < 0) {
        return FAILED;
    }
    if (is_some) {
        return write_numbers(self, side, number, request) < 0 ? FAILED : DONE;
    }
    write_no_payload(self, request);
    return DONE;
}

static PyObject *
step_exactly(Stepper *self, PyObject *number, int64_t request)
{
    Side *side = &self->sides[request & 1];
    unsigned char *bank = side->bank.buf;
    if (bank[0] != STEP || bank[1] & SKIPPED) {
        return PyObject_CallOneArg(self->reference, number);
    }
    _Atomic int64_t *words = ((Words *)self->words)->words;
    atomic_store(&words[BUSY], request);
    atomic_store(&words[SLOT], 1);
    PyObject *action = NULL, *call = NULL, *result = NULL;
    if (bank[1] == INT) {
        int64_t value;
        memcpy(&value, bank + HEAD, sizeof value);
        action = PyLong_FromLongLong(value);
    }
    else {
        PyObject *tag = PyLong_FromLong(bank[1]);
        action = tag == NULL ? NULL : PyObject_CallFunctionObjArgs(self->decode, number, tag, NULL);
        Py_XDECREF(tag);
    }
    if (action != NULL && (call = PySequence_GetItem(self->calls, 0)) != NULL) {
        result = PyObject_CallOneArg(call, action);
    }
    Outcome outcome = result == NULL ? FAILED : write_exactly(self, side, number, request, result);
    if (outcome == LEFT) {
        int failed = called(PyObject_CallFunctionObjArgs(self->rest, number, result, NULL)) < 0 ||
                     learn_from_packer(self) < 0;
        outcome = failed ? FAILED : DONE;
    }
    if (outcome == FAILED) {
        outcome = answer_failed(self, number) < 0 ? FAILED : DONE;
    }
    Py_XDECREF(action);
    Py_XDECREF(call);
    Py_XDECREF(result);
    return outcome == FAILED ? NULL : done_with(self);
}

static PyTypeObject RowsStepType;

static PyObject *step_once(Stepper *self, PyObject *number);

static int
stepper_traverse(Stepper *self, visitproc visit, void *arg)
{
#define VISIT_MEMBER(word) Py_VISIT(self->word);
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
#define CLEAR_MEMBER(word) Py_CLEAR(self->word);
    STEPPER(CLEAR_MEMBER)
    for (int each = 0; each < 2; each++) {
        Side *side = &self->sides[each];
        Py_CLEAR(side->cells);
        Py_CLEAR(side->key);
        Py_CLEAR(side->digest);
        Py_CLEAR(side->side);
        Py_CLEAR(side->dtype);
        PyBuffer_Release(&side->bank);
        PyBuffer_Release(&side->place);
        PyBuffer_Release(&side->whole);
    }
    forget_infos(&self->infos);
    return 0;
}

static void
stepper_dealloc(Stepper *self)
{
    PyObject_GC_UnTrack(self);
    stepper_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int
get_offset(PyObject *layout, PyObject *name, Py_ssize_t *offset)
{
    PyObject *found = PyObject_GetAttr(layout, name);
    *offset = found == NULL ? -1 : PyLong_AsSsize_t(found);
    Py_XDECREF(found);
    return *offset == -1 && PyErr_Occurred() ? -1 : 0;
}

static int
take_side(Side *side, PyObject *given, Py_ssize_t slots)
{
    PyObject *bank, *place, *whole, *view = NULL, *layout = NULL;
    if (!PyArg_ParseTuple(given, "OOOO!OOO", &bank, &place, &whole, &PyList_Type, &side->cells, &side->key,
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
                 PyObject_GetBuffer(place, &side->place, PyBUF_WRITABLE) < 0 ||
                 get_offset(layout, s_rewards, &side->rewards) < 0 ||
                 get_offset(layout, s_terminated, &side->flags) < 0 ||
                 get_offset(layout, s_shown, &side->unset) < 0;
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
    if (self->words == NULL || !Py_IS_TYPE(self->words, &WordsType) || ((Words *)self->words)->count <= SLOT ||
        self->calls == NULL || !PyList_CheckExact(self->calls) ||
        (self->told != NULL && !PyDict_CheckExact(self->told))) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_TypeError, "a stepper has words, and a list of calls");
    }
    self->slots = PyList_GET_SIZE(self->calls);
    int is_whole = self->reference && self->rest && self->fail && self->write_payload && self->decode && self->packer;
    if (type == &RowsStepType) {
        is_whole = is_whole && self->note_error && self->finish && self->take_info && self->told;
    }
    if (!is_whole) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_TypeError, "something that a stepper is made of is missing");
    }
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

#define STEPPER_TYPE(type, title, text)                                                                                \
    static PyTypeObject type = {                                                                                       \
        PyVarObject_HEAD_INIT(NULL, 0)                                                                                 \
        .tp_name = "multienv._native." title,                                                                          \
        .tp_doc = PyDoc_STR(text),                                                                                     \
        .tp_basicsize = sizeof(Stepper),                                                                               \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,                                                           \
        .tp_new = stepper_new,                                                                                         \
        .tp_traverse = (traverseproc)stepper_traverse,                                                                 \
        .tp_clear = (inquiry)stepper_clear,                                                                            \
        .tp_dealloc = (destructor)stepper_dealloc,                                                                     \
        .tp_call = (ternaryfunc)stepper_call,                                                                          \
    };
STEPPER_TYPE(RowsStepType, "RowsStep", "Executes a request; steps several envs. See worker/rows.py.")
STEPPER_TYPE(ExactStepType, "ExactStep", "Executes a request; steps one env. See worker/exact.py.")

static PyObject *
step_once(Stepper *self, PyObject *number)
{
    long long request = PyLong_AsLongLong(number);
    if (request == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return Py_IS_TYPE(self, &RowsStepType) ? step_rows(self, number, request) : step_exactly(self, number, request);
}

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
    int serves = Py_IS_TYPE(handle, &RowsStepType) || Py_IS_TYPE(handle, &ExactStepType);
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

PyDoc_STRVAR(core_doc, "core()\n--\n\nTell which core the calling thread runs on; -1 where the system does not tell.");

static PyObject *
core(PyObject *module, PyObject *args)
{
#ifdef __linux__
    return PyLong_FromLong(sched_getcpu());
#else
    return PyLong_FromLong(-1);
#endif
}

static PyMethodDef methods[] = {
    {"core", core, METH_NOARGS, core_doc},
    {"ask", ask, METH_VARARGS, ask_doc},
    {"take", take, METH_VARARGS, take_doc},
    {"follow", follow, METH_O, follow_doc},
    {"serve", serve, METH_VARARGS, serve_doc},
    {"write_digests", (PyCFunction)(void (*)(void))write_digests, METH_FASTCALL, write_digests_doc},
    {NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "multienv._native",
    .m_doc = PyDoc_STR("The loops of a plain step in native code; see _native.c."),
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__native(void)
{
#define INTERN_FIELD(word)                                                                                             \
    if ((f_##word.name = PyUnicode_InternFromString(#word)) == NULL) {                                                 \
        return NULL;                                                                                                   \
    }
#define INTERN_NAME(word)                                                                                              \
    if ((s_##word = PyUnicode_InternFromString(#word)) == NULL) {                                                      \
        return NULL;                                                                                                   \
    }
    for (uint64_t place = 0; place < BLOCK_WORDS; place++) {
        keys[place] = mixed((place + 1) * 0x9E3779B97F4A7C15u);
    }
    FIELDS(INTERN_FIELD)
    NAMES(INTERN_NAME)
    CONSTANTS(INTERN_NAME)
    PyObject *module = PyModule_Create(&definition);
    PyTypeObject *types[] = {&WordsType, &PartsType, &IntegersType, &ReaderType, &RowsReaderType,
                             &RowsStepType, &ExactStepType};
    for (size_t each = 0; each < sizeof types / sizeof *types; each++) {
        if (module != NULL && PyModule_AddType(module, types[each]) < 0) {
            Py_CLEAR(module);
        }
    }
    return module;
}
