/* Rows of token ids put into trees, and what the tokens of a tree see (trees.py). */

#define REPEATED_KIND 128 /* as in kinds.py */

/* A stretch of tokens that the same rows share; those of a path follow each other from depth 0 on. */
typedef struct {
    int64_t owner; /* the row whose tokens are read */
    int64_t start, end;
    int64_t parent, child, sibling; /* numbers of nodes, or NONE */
} branch_node;

#define NONE (-1)

typedef struct {
    const int32_t *ids;
    const int64_t *offsets;
    uint8_t *kinds, *kept;
    float *weights;
    branch_node *nodes;
    int64_t count;
} forest;

static inline int same_token(const forest *f, int64_t a, int64_t b)
{
    return f->ids[a] == f->ids[b] && ((f->kinds[a] ^ f->kinds[b]) | REPEATED_KIND) == REPEATED_KIND;
}

/* A shared token has the highest weight of its rows, and is context only where it is so in all of them. */
static inline void merge_token(forest *f, int64_t into, int64_t from)
{
    f->kinds[into] &= f->kinds[from] | (uint8_t)~REPEATED_KIND;
    f->kept[into] |= f->kept[from];
    if (f->weights[from] > f->weights[into]) f->weights[into] = f->weights[from];
}

static int64_t add_node(forest *f, branch_node node)
{
    f->nodes[f->count] = node;
    return f->count++;
}

static void add_child(forest *f, int64_t parent, int64_t child)
{
    int64_t *last = &f->nodes[parent].child;
    while (*last != NONE) last = &f->nodes[*last].sibling;
    *last = child;
}

static void plant_row(forest *f, int64_t row)
{
    const int64_t base = f->offsets[row], length = f->offsets[row + 1] - base;
    int64_t at = 0, depth = 0; /* the node above, whose stretch ends here */
    while (depth < length) {
        int64_t next = f->nodes[at].child;
        while (next != NONE && !same_token(f, f->offsets[f->nodes[next].owner] + depth, base + depth)) {
            next = f->nodes[next].sibling;
        }
        if (next == NONE) {
            const branch_node leaf = {row, depth, length, at, NONE, NONE};
            add_child(f, at, add_node(f, leaf));
            return;
        }
        const int64_t own = f->offsets[f->nodes[next].owner], end = f->nodes[next].end;
        const int64_t stop = end < length ? end : length;
        while (depth < stop && same_token(f, own + depth, base + depth)) {
            merge_token(f, own + depth, base + depth);
            depth++;
        }
        if (depth == length) return;
        if (depth < end) { /* the stretch is cut here, and what is left of it comes first */
            branch_node rest = f->nodes[next];
            rest.start = depth;
            rest.parent = next;
            rest.sibling = NONE;
            const int64_t number = add_node(f, rest);
            for (int64_t c = rest.child; c != NONE; c = f->nodes[c].sibling) f->nodes[c].parent = number;
            f->nodes[next].end = depth;
            f->nodes[next].child = number;
        }
        at = next;
    }
}

#define COPY_STATE 1
#define AGAIN_STATE 2

typedef struct {
    int64_t *source;
    uint8_t *state;
    int64_t *starts, *depths;                    /* of branches */
    int64_t *lengths, *branches, *groups; /* of trees: tokens, branches and the group */
    int64_t trees, tokens, branch_count;
} grown;

/* The tokens of a path up to `end`, which an earlier tree has too. */
static void repeat_path(const forest *f, grown *out, int64_t node, int64_t end)
{
    int64_t at = out->tokens + end;
    out->tokens = at;
    while (end > 0) {
        const branch_node *n = &f->nodes[node];
        const int64_t base = f->offsets[n->owner];
        for (; end > n->start; end--) {
            out->source[--at] = base + end - 1;
            out->state[at] = AGAIN_STATE;
        }
        node = n->parent;
    }
}

static void write_trees(const forest *f, grown *out, int64_t group, int64_t capacity)
{
    int64_t used = 0;
    for (int64_t fresh = f->nodes[0].child; fresh != NONE;) { /* the first node of a branch */
        int64_t leaf = fresh;
        while (f->nodes[leaf].child != NONE) leaf = f->nodes[leaf].child;
        const int64_t depth = f->nodes[fresh].start, more = f->nodes[leaf].end - depth;
        if (!depth || used + 1 + more > capacity) {
            const int64_t tree = out->trees++;
            out->lengths[tree] = out->branches[tree] = 0;
            out->groups[tree] = group;
            repeat_path(f, out, f->nodes[fresh].parent, depth);
            used = depth;
        } else {
            const int64_t above = f->nodes[fresh].parent;
            out->starts[out->branch_count] = used;
            out->depths[out->branch_count++] = depth - 1;
            out->branches[out->trees - 1]++;
            out->source[out->tokens] = f->offsets[f->nodes[above].owner] + depth - 1;
            out->state[out->tokens++] = COPY_STATE;
            used++;
        }
        for (int64_t n = fresh; n != NONE; n = f->nodes[n].child) {
            const int64_t base = f->offsets[f->nodes[n].owner];
            for (int64_t d = f->nodes[n].start; d < f->nodes[n].end; d++) {
                out->source[out->tokens] = base + d;
                out->state[out->tokens++] = 0;
            }
        }
        used += more;
        out->lengths[out->trees - 1] = used;
        while (leaf != NONE && f->nodes[leaf].sibling == NONE) leaf = f->nodes[leaf].parent;
        fresh = leaf == NONE ? NONE : f->nodes[leaf].sibling;
    }
}

/* The rows of each group as trees of up to `capacity` tokens. There is room for as many tokens, trees and branches as the
 * rows have tokens and as there are rows; `nodes` has room for two of each row of a group, and one. Kinds, weights and
 * the kept flags are changed where tokens are shared. Returns the trees, or -1 where a number lies outside its array. */
EXPORT int64_t chatmill_trees(const int32_t *ids, const int64_t *offsets, uint8_t *kinds, float *weights, uint8_t *kept,
                              int64_t rows, const int64_t *group_rows, int64_t groups, int64_t capacity,
                              branch_node *nodes, int64_t most, int64_t *source, uint8_t *state, int64_t *starts,
                              int64_t *depths, int64_t *lengths, int64_t *branches, int64_t *tree_groups)
{
    forest f = {ids, offsets, kinds, kept, weights, nodes, 0};
    grown out = {source, state, starts, depths, lengths, branches, tree_groups, 0, 0, 0};
    for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = group_rows[g], end = group_rows[g + 1];
        if (begin < 0 || begin > end || end > rows || end - begin > most) return -1;
        const branch_node root = {NONE, 0, 0, NONE, NONE, NONE};
        f.count = 0;
        add_node(&f, root);
        for (int64_t row = begin; row < end; row++) plant_row(&f, row);
        write_trees(&f, &out, g, capacity);
    }
    return out.trees;
}

/* Position and end of every token: trees one behind the other, with `branches` of them in each. `path` has room for the
 * tokens of the longest tree. Returns the tokens, or -1 where a branch lies outside its tree. */
EXPORT int64_t chatmill_tree_ends(const int64_t *lengths, const int64_t *branches, int64_t trees, const int64_t *starts,
                                  const int64_t *depths, int32_t *path, int32_t *positions, int32_t *ends)
{
    int64_t at = 0, branch = 0;
    for (int64_t t = 0; t < trees; t++) {
        int64_t begin = 0, depth = 0;
        for (int64_t b = 0; b <= branches[t]; b++, branch++) {
            const int is_last = b == branches[t];
            const int64_t end = is_last ? lengths[t] : starts[branch];
            if (end < begin || end > lengths[t] || (end == begin && branches[t])) return -1;
            for (int64_t i = begin; i < end; i++, depth++) {
                positions[at + i] = (int32_t)depth;
                path[depth] = (int32_t)i; /* the token at each depth */
            }
            const int64_t next = is_last ? 0 : depths[branch];
            if (next < 0 || (next >= depth && !is_last)) return -1;
            for (int64_t d = next; d < depth; d++) ends[at + path[d]] = (int32_t)end;
            begin = end;
            depth = next;
        }
        branch--;
        at += lengths[t];
    }
    return at;
}
