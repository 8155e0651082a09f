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
    const int64_t *bases; /* where the tokens of each row would begin if it had all of them */
    const int64_t *parents, *begins, *ends; /* the row that each goes on from, and the depths of its own tokens */
    uint8_t *kinds, *kept, *later;
    float *weights;
    branch_node *nodes;
    int64_t *leaves; /* for each row a node that its path ends in, or that is below */
    int64_t count;
} forest;

/* Whether two rows share a token: not one that both train where before it, in one of them, something is left out of its
 * conversation. That the rows are alike so far is then no more than chance, and one of two answers would be lost. */
static inline int same_token(const forest *f, int64_t a, int64_t b)
{
    if (f->ids[a] != f->ids[b] || ((f->kinds[a] ^ f->kinds[b]) | REPEATED_KIND) != REPEATED_KIND) return 0;
    return !((f->later[a] | f->later[b]) && f->weights[a] > 0 && f->weights[b] > 0);
}

/* A shared token has the highest weight of its rows, and is context only where it is so in all of them. */
static inline void merge_token(forest *f, int64_t into, int64_t from)
{
    f->kinds[into] &= f->kinds[from] | (uint8_t)~REPEATED_KIND;
    f->kept[into] |= f->kept[from];
    f->later[into] |= f->later[from];
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

/* Cut the stretch of a node: what is above the depth becomes a node of its own, which is returned. */
static int64_t cut_above(forest *f, int64_t node, int64_t depth)
{
    branch_node upper = f->nodes[node];
    int64_t *link = &f->nodes[upper.parent].child;
    while (*link != node) link = &f->nodes[*link].sibling;
    upper.end = depth;
    upper.child = node;
    f->nodes[node].start = depth;
    f->nodes[node].sibling = NONE;
    return f->nodes[node].parent = *link = add_node(f, upper);
}

static void plant_row(forest *f, int64_t row)
{
    const int64_t base = f->bases[row], length = f->ends[row], parent = f->parents[row];
    int64_t depth = f->begins[row], at = 0; /* the node whose stretch the row is in, or has passed */
    if (parent != NONE) {
        at = f->leaves[parent];
        while (at && f->nodes[at].start >= depth) at = f->nodes[at].parent;
    }
    while (depth < length) {
        if (depth == f->nodes[at].end) {
            int64_t next = f->nodes[at].child;
            while (next != NONE && !same_token(f, f->bases[f->nodes[next].owner] + depth, base + depth)) {
                next = f->nodes[next].sibling;
            }
            if (next == NONE) {
                const branch_node leaf = {row, depth, length, at, NONE, NONE};
                const int64_t number = add_node(f, leaf);
                add_child(f, at, number);
                at = number;
                break;
            }
            at = next;
        }
        const int64_t own = f->bases[f->nodes[at].owner], end = f->nodes[at].end;
        const int64_t stop = end < length ? end : length;
        while (depth < stop && same_token(f, own + depth, base + depth)) {
            merge_token(f, own + depth, base + depth);
            depth++;
        }
        if (depth < stop) at = cut_above(f, at, depth);
    }
    f->leaves[row] = at;
}

#define COPY_STATE 1
#define AGAIN_STATE 2

/* Tokens of a row that follow each other in a tree. */
typedef struct {
    int64_t first, count, state;
} token_slice;

typedef struct {
    list slices;
    int64_t *starts, *depths;             /* of branches */
    int64_t *lengths, *branches, *groups; /* of trees: tokens, branches and the group */
    int64_t trees, branch_count;
} grown;

static int write_slice(const forest *f, grown *out, int64_t row, int64_t start, int64_t end, int64_t state)
{
    token_slice *slice = appended(&out->slices, 1, sizeof *slice);
    if (slice) *slice = (token_slice){f->bases[row] + start, end - start, state};
    return slice != NULL;
}

/* The tokens of a path up to `end`, which an earlier tree has too. */
static int repeat_path(const forest *f, grown *out, int64_t node, int64_t end)
{
    const int64_t first = out->slices.count;
    for (; end; end = f->nodes[node].start, node = f->nodes[node].parent) {
        if (!write_slice(f, out, f->nodes[node].owner, f->nodes[node].start, end, AGAIN_STATE)) return 0;
    }
    for (int64_t a = first, b = out->slices.count - 1; a < b; a++, b--) { /* the root first */
        const token_slice upper = ITEM(token_slice, out->slices, b);
        ITEM(token_slice, out->slices, b) = ITEM(token_slice, out->slices, a);
        ITEM(token_slice, out->slices, a) = upper;
    }
    return 1;
}

static int write_trees(const forest *f, grown *out, int64_t group, int64_t capacity)
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
            if (!repeat_path(f, out, f->nodes[fresh].parent, depth)) return 0;
            used = depth;
        } else {
            const int64_t above = f->nodes[fresh].parent;
            out->starts[out->branch_count] = used;
            out->depths[out->branch_count++] = depth - 1;
            out->branches[out->trees - 1]++;
            if (!write_slice(f, out, f->nodes[above].owner, depth - 1, depth, COPY_STATE)) return 0;
            used++;
        }
        for (int64_t n = fresh; n != NONE; n = f->nodes[n].child) {
            if (!write_slice(f, out, f->nodes[n].owner, f->nodes[n].start, f->nodes[n].end, 0)) return 0;
        }
        used += more;
        out->lengths[out->trees - 1] = used;
        while (leaf != NONE && f->nodes[leaf].sibling == NONE) leaf = f->nodes[leaf].parent;
        fresh = leaf == NONE ? NONE : f->nodes[leaf].sibling;
    }
    return 1;
}

/* The rows of each group as trees of up to `capacity` tokens. There is room for as many trees and branches as there are
 * rows; `nodes` has room for two of each row of a group, and one, and `leaves` for one of each row. Kinds, weights and
 * flags are changed where tokens are shared. Returns the trees, or -1 where a number lies outside its array or memory
 * is short; `slices` are to be freed. */
EXPORT int64_t chatmill_trees(const int32_t *ids, const int64_t *bases, const int64_t *parents, const int64_t *begins,
                              const int64_t *ends, uint8_t *kinds, float *weights, uint8_t *kept, uint8_t *later,
                              int64_t rows, const int64_t *group_rows, int64_t groups, int64_t capacity, branch_node *nodes, int64_t most,
                              int64_t *leaves, int64_t *starts, int64_t *depths, int64_t *lengths, int64_t *branches,
                              int64_t *tree_groups, list *slices)
{
    forest f = {ids, bases, parents, begins, ends, kinds, kept, later, weights, nodes, leaves, 0};
    grown out = {{0}, starts, depths, lengths, branches, tree_groups, 0, 0};
    int is_done = 1;
    for (int64_t g = 0; g < groups && is_done; g++) {
        const int64_t first = group_rows[g], last = group_rows[g + 1];
        is_done = first >= 0 && first <= last && last <= rows && last - first <= most;
        const branch_node root = {NONE, 0, 0, NONE, NONE, NONE};
        f.count = 0;
        add_node(&f, root);
        for (int64_t row = first; row < last && is_done; row++) {
            const int64_t parent = parents[row];
            is_done = parent == NONE || (parent >= first && parent < row);
            const int64_t most_shared = is_done && parent != NONE ? ends[parent] : 0;
            is_done = is_done && begins[row] >= 0 && begins[row] <= most_shared && begins[row] <= ends[row];
            if (is_done) plant_row(&f, row);
        }
        is_done = is_done && write_trees(&f, &out, g, capacity);
    }
    *slices = out.slices;
    return is_done ? out.trees : -1;
}

EXPORT int64_t chatmill_free_list(list *l)
{
    free(l->data);
    return 0;
}

/* The tokens of slices of rows, and their runs: nothing changes inside of one, and no tree or branch begins there.
 * `trees` has the first token of each tree and the number of all; the runs of the rows, `run_offsets` and
 * `run_messages`, are read for messages alone. There is room for as many runs as tokens. Returns the runs. */
EXPORT int64_t chatmill_tree_runs(const int64_t *firsts, const int64_t *counts, const int64_t *states, int64_t slices,
                                  const int64_t *trees, const int32_t *ids, const uint8_t *kinds, const float *weights,
                                  const uint8_t *kept, const int64_t *run_offsets, const int32_t *run_messages, int64_t runs,
                                  int32_t *out_ids, int64_t *starts, uint8_t *out_kinds, int32_t *messages,
                                  float *out_weights, uint8_t *injected)
{
    int64_t at = 0, made = -1; /* the run that is written */
    int opens = 0;
    for (int64_t s = 0; s < slices; s++) {
        const int64_t first = firsts[s], end = first + counts[s], state = states[s];
        const uint8_t more = state == AGAIN_STATE ? REPEATED_KIND : 0;
        if (at == *trees || state == COPY_STATE) opens = 1;
        if (at == *trees) trees++;
        int64_t run = 0, last = runs; /* the run of the first token is among these */
        while (last - run > 1) {
            const int64_t middle = run + (last - run) / 2;
            if (run_offsets[middle] <= first) run = middle;
            else last = middle;
        }
        memcpy(out_ids + at, ids + first, (size_t)(end - first) * sizeof *ids);
        at -= first; /* from the place of a token in its row to that in its tree */
        for (int64_t t = first; t < end;) {
            while (run_offsets[run + 1] <= t) run++;
            const int64_t stop = run_offsets[run + 1] < end ? run_offsets[run + 1] : end;
            const uint8_t own_kind = kinds[t], own_kept = kept[t], kind = own_kind | more, is_injected = state || !own_kept;
            const float own_weight = weights[t], weight = state ? 0 : own_weight;
            const int32_t message = run_messages[run];
            if (opens || kind != out_kinds[made] || weight != out_weights[made] || message != messages[made] ||
                is_injected != injected[made]) {
                made++;
                starts[made] = at + t;
                out_kinds[made] = kind;
                out_weights[made] = weight;
                messages[made] = message;
                injected[made] = is_injected;
                opens = 0;
            }
            do t++;
            while (t < stop && kinds[t] == own_kind && kept[t] == own_kept && weights[t] == own_weight);
        }
        at += end;
    }
    return made + 1;
}

/* Position and end of every token: trees one after another, with `branches` of them in each. `path` has room for the
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
