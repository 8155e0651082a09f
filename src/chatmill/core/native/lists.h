/* An array that grows. */
typedef struct {
    void *data;
    int64_t count, capacity;
} list;

#define ITEM(type, l, index) (((type *)(l).data)[index])

static void *appended(list *l, int64_t more, size_t size)
{
    if (!l->data || l->count + more > l->capacity) {
        const int64_t capacity = 2 * (l->count + more) + 64;
        void *grown = realloc(l->data, (size_t)capacity * size);
        if (!grown) return NULL;
        l->data = grown;
        l->capacity = capacity;
    }
    void *place = (char *)l->data + (size_t)l->count * size;
    l->count += more;
    return place;
}
