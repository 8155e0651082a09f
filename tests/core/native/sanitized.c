/* Runs the compiled part over lines in buffers of their exact size, for the address and undefined-behaviour sanitizers.
 *
 * Standard input: for every line its length (4 bytes, the machine's order) and its bytes.
 * Standard output: lines scanned, lines read, messages, calls, a sum over all copies, and of how many lines a
 * template was replayed and a document written.
 */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "columns.c"

static void *room(int64_t count, size_t size)
{
    void *found = malloc((size_t)count * size);
    if (!found && count) abort();
    return found;
}

#define INTS(count) room((count), sizeof(int64_t))

static int64_t totals[4], renderings_known;

static const int64_t LISTS[] = {LIST,  LIST,  ID,          SOURCE, TOOLS,   OPTIONS, EMPTY,
                                EMPTY, EMPTY, SYSTEM_TEXT, CALLS,  ANSWER,  QUESTION, REPEATED,
                                SCORE, SCORE + 1};
static const char *const LIST_NAMES[] = {"messages",      "conversations", "id",   "source", "tools", "chat_template_kwargs",
                                         "messages_json", "history",       "label", "system", "calls", "chosen",
                                         "prompt",        "rejected",      "margin", "chosen_score"};
static const int64_t TURNS[] = {TURN,          TURN + 1, TURN + 2,  TURN + MAX_JOINED, ID,   SYSTEM_TEXT, EMPTY,
                                TURN + 5 * MAX_JOINED};
static const char *const TURN_NAMES[] = {"instruction", "input", "context", "output", "id", "system", "history", "prompt"};
static const int64_t FIELDS[] = {ROLE,  ROLE, CONTENT,      CONTENT,   REASONING, REASONING,   TOOL_CALLS,
                                 WEIGHT, TRAIN, TOOL_CALL_ID, RECIPIENT, CHANNEL,   CONTENT_TYPE, NAME,
                                 TOKEN_IDS, PROMPT_TOKEN_IDS, LOGPROBS, FINISH_REASON, PASSED_FIELD, NULL_FIELD, EMPTY_FIELD};
static const char *const FIELD_NAMES[] = {"role",   "from",  "content",      "value",     "reasoning_content", "thinking",
                                          "tool_calls", "weight", "train", "tool_call_id", "recipient", "channel",
                                          "content_type", "name", "token_ids", "prompt_token_ids", "logprobs", "finish_reason",
                                          "refusal", "function_call", "images"};
static const int64_t ROLES[] = {SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL, USER, ASSISTANT, TOOL, ASSISTANT};
static const char *const ROLE_NAMES[] = {"system", "developer", "user", "assistant", "tool", "human", "gpt", "observation", "agent"};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* The names of a shape in arrays of their exact size, as `scan.py` hands them over. */
typedef struct {
    shape_names names;
    uint8_t *text, *meanings;
    int64_t *lengths, bytes, count;
} shape_arrays;

static void add_names(shape_arrays *to, int kind, const char *const *names, const int64_t *meanings, size_t count)
{
    to->names.counts[kind] = (int64_t)count;
    for (size_t i = 0; i < count; i++) {
        const size_t length = strlen(names[i]);
        to->text = realloc(to->text, (size_t)to->bytes + length + 1);
        to->meanings = realloc(to->meanings, (size_t)to->count + 1);
        to->lengths = realloc(to->lengths, ((size_t)to->count + 1) * sizeof(int64_t));
        memcpy(to->text + to->bytes, names[i], length);
        to->text[to->bytes + (int64_t)length] = '"';
        to->bytes += (int64_t)length + 1;
        to->meanings[to->count] = (uint8_t)meanings[i];
        to->lengths[to->count++] = (int64_t)length + 1;
    }
}

static shape_arrays shape_of(const char *const *names, const int64_t *meanings, size_t count)
{
    shape_arrays found = {.count = 0};
    add_names(&found, 0, names, meanings, count);
    add_names(&found, 1, FIELD_NAMES, FIELDS, COUNT(FIELDS));
    add_names(&found, 2, ROLE_NAMES, ROLES, COUNT(ROLES));
    found.names.text = found.text;
    found.names.lengths = found.lengths;
    found.names.meanings = found.meanings;
    return found;
}

/* Room for `share` sixteenths of what a line may need, so that every array is too small now and then. */
static void scan(const uint8_t *data, int64_t size, const shape_names *names, int64_t share, int as_texts)
{
    const int64_t lines = as_texts ? 1 : chatmill_count_lines(data, 0, size), part = size * share / 16;
    const int64_t records = lines;
    columns c = {.line_capacity = records,
                 .message_capacity = part / 8,
                 .call_capacity = part / 39,
                 .rare_capacity = part / 8,
                 .weight_capacity = part / 8,
                 .text_capacity = 3 * part,
                 .json_capacity = 2 * part,
                 .unused_capacity = part / 4,
                 .extra_capacity = part / 4,
                 .score_capacity = part / 4};
    texts *const columns_of[] = {&c.ids,      &c.sources,   &c.tools,      &c.listed,         &c.options,
                                 &c.contents, &c.reasoning, &c.call_names, &c.call_arguments, &c.call_ids};
    for (int i = 0; i < 10; i++) {
        const int64_t count = i < 5 ? records : i < 7 ? c.message_capacity : c.call_capacity;
        *columns_of[i] = (texts){INTS(count), INTS(count)};
    }
    c.line_starts = INTS(records);
    c.line_stops = INTS(records);
    c.read = room(records, 1);
    c.message_offsets = INTS(records + 1);
    c.roles = room(c.message_capacity, 1);
    c.call_offsets = INTS(c.message_capacity + 1);
    c.call_orders = room(c.call_capacity, 1);
    c.rare = room(c.rare_capacity, sizeof(rare_text));
    c.weights = room(c.weight_capacity, sizeof(weight));
    c.text = room(c.text_capacity, 1);
    c.json = room(c.json_capacity, 1);
    c.unused = room(c.unused_capacity, sizeof(unused_field));
    c.extras = room(c.extra_capacity, sizeof(extra_field));
    c.scores = room(c.score_capacity, sizeof(score));
    const int64_t offsets[2] = {0, size};
    const int64_t found = as_texts ? chatmill_scan_texts(data, size, offsets, 1, names, &c)
                                   : chatmill_scan(data, 0, size, names, &c);
    if (found != lines) abort();
    if (!as_texts && share == 16) {
        totals[0] += lines;
        for (int64_t i = 0; i < c.lines; i++) totals[1] += c.read[i];
        totals[2] += c.messages;
        totals[3] += c.calls;
    }
    for (int i = 0; i < 10; i++) free(columns_of[i]->starts), free(columns_of[i]->lengths);
    free(c.line_starts), free(c.line_stops), free(c.read), free(c.message_offsets), free(c.roles), free(c.call_offsets);
    free(c.call_orders), free(c.rare), free(c.weights), free(c.text), free(c.json);
    free(c.unused), free(c.extras), free(c.scores);
}

/* Tokens, texts and bytes that are those of a line, right or wrong as they come. */
static int64_t points(const uint8_t *data, int64_t size, const int64_t *which, const int64_t *bytes, int64_t count)
{
    const int64_t texts = size / 5;
    int32_t *ids = room(size, sizeof(int32_t)), *sizes = room(100, sizeof(int32_t));
    int64_t *offsets = INTS(texts + 1), *found = INTS(count);
    for (int64_t i = 0; i < size; i++) ids[i] = data[i] % (data[0] & 1 ? 128 : 100);
    for (int32_t i = 0; i < 100; i++) sizes[i] = i % 7;
    for (int64_t i = 0; i <= texts; i++) offsets[i] = data[0] & 2 && size ? i * data[i] % (size + 2) : i * 5;
    const int64_t done = chatmill_points(ids, size, sizes, 100, offsets, texts, which, bytes, count, found);
    free(ids), free(sizes), free(offsets), free(found);
    return done;
}

/* Rows of plans, conversations, messages and calls that are the bytes of a line, right or wrong as they come. */
static int64_t layout(const uint8_t *data, int64_t size)
{
    const int64_t lines = size / 8, plans = lines / 4, rows = size / 8, conversations = 3, messages = 6, calls = 4;
    item *items = room(lines, sizeof *items);
    int64_t *firsts = INTS(plans + 1), *chosen = INTS(rows);
    int64_t *owner = INTS(rows), *bases = INTS(rows), *message_offsets = INTS(conversations + 1);
    int64_t *call_offsets = INTS(messages + 1), *texts = INTS(messages), laid = 0;
    for (int64_t i = 0; i < lines; i++) {
        const uint8_t *const line = data + 8 * i;
        const int32_t owner_of = line[3] % 3 - (line[3] == 'e');
        items[i] = (item){
            .start = line[6], .size = line[6], .owner = line[3] == 'a' ? NOBODY : owner_of, .message = owner_of,
            .call = line[4] % 2, .operations = line[5] % 2, .kind = line[1], .origin = line[2] % (WITHOUT_COLUMN + 2),
            .is_ids = line[0] & 1, .opens = line[1] & 1, .form = line[5] % 3,
        };
    }
    for (int64_t i = 0; i <= plans; i++) firsts[i] = 4 * i;
    for (int64_t i = 0; i <= conversations; i++) message_offsets[i] = 2 * i;
    for (int64_t i = 0; i <= messages; i++) call_offsets[i] = i < 2 ? 0 : i < 5 ? 2 : calls;
    for (int64_t i = 0; i < messages; i++) texts[i] = i;
    for (int64_t i = 0; i < rows; i++) {
        chosen[i] = plans ? data[i] % plans + (data[i] == '~') : 0;
        owner[i] = data[i] % conversations;
        bases[i] = data[i] % 2 - (data[i] == 'o');
        laid += 4;
    }
    const item_table table = {firsts, items, plans};
    int64_t *firsts_of_rows = INTS(rows / 2 + 1), *skips = INTS(rows), *parents = INTS(rows / 2), *until = INTS(rows / 2);
    path_item *path = room(laid, sizeof *path);
    other_kind *others = room(laid, sizeof *others);
    for (int64_t i = 0; i <= rows / 2; i++) firsts_of_rows[i] = i == rows / 2 ? rows : 2 * i;
    if (rows / 2 < 1 || chatmill_share(&table, chosen, bases, firsts_of_rows, owner, rows / 2, path, skips, parents, until, others) < 0)
        memset(skips, 0, (size_t)rows * sizeof *skips);
    for (int64_t i = 0; i < rows; i++) laid -= skips[i];
    free(firsts_of_rows), free(parents), free(until), free(path), free(others);
    shown_column columns[WITHOUT_COLUMN] = {{NULL, NULL, 0}};
    for (int i = 1; i < WITHOUT_COLUMN - (int)(size % 2); i++) columns[i] = (shown_column){texts, texts, i % 3};
    laid_out out = {.starts = INTS(laid), .sizes = INTS(laid), .kinds = room(laid, 1), .is_text = room(laid, 1),
                    .owners = room(laid, 4), .text_items = INTS(laid), .lines = INTS(laid),
                    .conversations = INTS(laid), .bases = INTS(laid), .which = room(laid, 1),
                    .text_starts = INTS(laid), .text_sizes = INTS(laid), .opens = room(laid, 1), .others = INTS(laid),
                    .whole = room(2 * messages, 1)};
    const int64_t found = chatmill_lay_out(&table, chosen, owner, bases, skips, rows, message_offsets, conversations, call_offsets,
                                           columns, &out);
    free(items), free(skips), free(firsts), free(chosen), free(owner), free(bases);
    free(message_offsets), free(call_offsets), free(texts), free(out.starts), free(out.sizes), free(out.kinds);
    free(out.is_text), free(out.owners), free(out.text_items), free(out.lines), free(out.conversations), free(out.bases);
    free(out.which), free(out.text_starts), free(out.text_sizes), free(out.opens), free(out.others), free(out.whole);
    return found == laid;
}

static int64_t replay(const uint8_t *data, int64_t size);

/* Copies whose starts, lengths and numbers of buffers are the bytes of a line, right or wrong as they come. */
static int64_t copy(const uint8_t *data, int64_t size)
{
    const int64_t count = size / 4, sizes[2] = {size, size / 3};
    uint8_t *second = room(sizes[1], 1), *which = room(count, 1);
    int64_t *starts = INTS(count), *lengths = INTS(count), total = 0, sum = 0;
    if (sizes[1]) memcpy(second, data, (size_t)sizes[1]);
    const uint8_t *buffers[2] = {data, second};
    for (int64_t i = 0; i < count; i++) {
        which[i] = data[4 * i] & 1;
        starts[i] = data[4 * i + 1] % (sizes[which[i]] + 1);
        lengths[i] = data[4 * i + 2] % (sizes[which[i]] - starts[i] + 1) - (data[4 * i + 3] == 'e');
        total += lengths[i];
    }
    if (total < 0) total = 0;
    int64_t places[3];
    sum += chatmill_find(data, size, (const uint8_t *)"\"id\"", 4, places, size % 4);
    uint8_t *out = room(total, 1);
    const int64_t gathered = chatmill_gather(buffers, sizes, 2, which, starts, lengths, count, 1, out, total);
    const int64_t slots = 1024; /* more than the texts of any line here */
    int64_t *numbers = INTS(count), *firsts = INTS(count), *table = INTS(slots);
    memset(table, 0xFF, (size_t)slots * sizeof(int64_t));
    if (count < slots) sum += chatmill_distinct(data, size, starts, lengths, count, numbers, firsts, table, slots) > 0;
    uint8_t *opens = room(count, 1), *highs = room(count, 1), *kept = room(total, 1);
    int64_t *before = INTS(count), *offsets = INTS(count + 1);
    for (int64_t i = 0; i < count; i++) opens[i] = data[4 * i + 3] & 1;
    memset(table, 0xFF, (size_t)slots * sizeof(int64_t));
    if (count < slots) {
        sum += chatmill_pieces(buffers, sizes, 2, which, starts, lengths, opens, count, kept, total, numbers, before,
                               offsets, highs, table, slots) > 0;
    }
    free(opens), free(highs), free(kept), free(before), free(offsets);
    static const uint8_t trims[256] = {[' '] = 1, ['"'] = 1}, wide_spaces[] = {2, 0xC2, 0xA0, 3, 0xE2, 0x80, 0x83};
    sum += chatmill_not_ascii(data, size, starts, lengths, count, which) > 0;
    static const int64_t points_inside[] = {0x80, 0x2FF, 0x4E00, 0x9FFF, 0x10000, 0x10FFFF};
    sum += chatmill_other_characters(data, size, starts, lengths, count, points_inside, 3, which) > 0;
    sum += chatmill_characters(data, size, starts, lengths, count, numbers) > 0;
    for (int sides = 1; sides <= 3; sides++) {
        sum += chatmill_trim(data, size, starts, lengths, count, trims, wide_spaces, 7, sides, numbers, firsts) > 0;
    }
    free(numbers), free(firsts), free(table);
    int64_t found[2];
    sum += chatmill_find(data, size, (const uint8_t *)"\"role", 5, found, 2) > 0;
    sum += points(data, size, starts, lengths, count) > 0;
    sum += layout(data, size);
    renderings_known += replay(data, size);
    sum += (gathered == total);
    free(second), free(which), free(starts), free(lengths), free(out);
    return sum;
}

/* What a template would reply: bytes of a line. Loops have tables after the root's, and segments stay what they are. */
static const uint8_t *said;
static int64_t said_size;

static int64_t reply_of(int64_t what, int64_t a, int64_t b, int64_t c)
{
    const int64_t byte = said[(7 * llabs(a) + 3 * llabs(b) + llabs(c)) % said_size];
    if (what == ASK_TABLE) return 1 + a;
    if (what == ASK_PLACED) return a;
    return byte == '~' ? -1 : byte % 3;
}

/* A chain of nodes after a table that a line decides; every reply from 0 to 2 leads on, to a leaf at its end. */
static void chain(replayer *r, int64_t table, int is_inner, int64_t leaf)
{
    int64_t parent = table;
    for (int64_t i = 0; i < 7; i++) {
        const int64_t byte = said[(table * 11 + i) % said_size], form = byte % (is_inner ? 5 : 4);
        const int64_t nodes[9][4] = {{OF_MESSAGE, byte % 3, byte % 4, byte % 5 - 2}, {COMPARES, form, byte % 5, byte % 4},
                                     {REMAINDER, form, 1 + byte % 3, 0}, {POSITION, form, 0, 0},
                                     {STATE, byte % 2, byte % 3, 0}, {LOOP, 1 + byte % 2, 0, 0},
                                     {SETS, byte % 2, byte % 3, byte % 2}, {MAKES, 0, 0, 0}, {ASKED, byte % 3, 0, 0}};
        const int64_t *n = nodes[is_inner && byte % 9 == LOOP ? ASKED : byte % 9];
        const int64_t made = chatmill_add_node(r, n[0], n[1], n[2], n[3]);
        for (int64_t reply = 0; reply < 6; reply++) chatmill_link(r, parent, reply, made);
        parent = made;
    }
    for (int64_t reply = 0; reply < 6; reply++) chatmill_link(r, parent, reply, ~leaf);
}

/* The branches of all messages, each as if it were an answer, and what the last rendering shows of each message. */
static void look_at_branches(const uint8_t *data, const rendering *all, int64_t count, const output *outputs,
                             const int32_t *classes, int64_t messages)
{
    segment_facts facts[16];
    for (int i = 0; i < 16; i++) facts[i] = (segment_facts){data[i] % 3, data[15 - i] % 3, data[i] & 1};
    const rendering *whole = &all[count - 1];
    const int64_t size = whole->ended == KNOWN ? whole->stop : 0;
    output *shown = room(size, sizeof *shown);
    int64_t *ends = room(messages, sizeof *ends), *last_places = room(messages, sizeof *last_places);
    const int64_t is_simple = chatmill_shown(outputs, size, facts, messages, shown, ends, last_places);
    int64_t *answers = room(3 * messages, sizeof *answers);
    for (int64_t i = 0; i < messages; i++) {
        answers[3 * i] = i;
        answers[3 * i + 1] = data[i] % count;
        answers[3 * i + 2] = data[i + 1] % count;
    }
    const int64_t capacity = data[12];
    seen *places = room(capacity, sizeof *places);
    branch *found = room(messages, sizeof *found);
    const int64_t used = chatmill_branches(all, outputs, facts, classes, messages + 1, is_simple ? last_places : NULL, answers,
                                           messages, places, capacity, found);
    if (used < 0 || used > capacity) abort();
    free(shown), free(ends), free(last_places), free(answers), free(places), free(found);
}

/* Renderings of a conversation of up to nine messages, by tries that are the bytes of a line. */
static int64_t replay(const uint8_t *data, int64_t size)
{
    if (size < 16) return 0;
    said = data, said_size = size;
    replayer *r = chatmill_replayer(reply_of, 3, 4);
    if (!r) abort();
    const int64_t pairs[] = {2, 0, 0, 1, 1}, none[1] = {0}, own[] = {OWN, 1}, count[] = {OWN, -1, COUNT, 1}, first[] = {0, 1};
    chatmill_add_numbers(r, pairs, 5);
    for (int64_t i = 0; i < 3; i++) chatmill_add_column(r, i);
    for (int64_t i = 0; i < 4; i++) chatmill_add_node(r, ASKED, -1, 0, 0); /* the tables of the root and of three loops */
    chatmill_add_form(r, none, 0, data[1] % 3);
    chatmill_add_form(r, own, 1, data[2] % 3 - 1);
    chatmill_add_form(r, count, 2, -1);
    chatmill_add_form(r, count + 2, 1, 0);
    chatmill_add_form(r, first, 1, 0);
    const int64_t kept = 1;
    chatmill_add_recipe(r, none, 0, 0, 1);
    chatmill_add_recipe(r, &kept, 1, data[3] & 1, 2);
    const int64_t over_messages[] = {1, 1, data[4] & 1, 0, 0, 0, 0}, back[] = {1, 1, 1, data[5] % 2, 0, 0, data[5] & 1};
    const int64_t numbers[] = {0, 1, data[6] & 1, 0, 0, 1, 0};
    chatmill_add_loop(r, over_messages, none, 0);
    chatmill_add_loop(r, back, none, 1);
    chatmill_add_loop(r, numbers, &kept, 1);
    for (int64_t i = 0; i < 6; i++) {
        if (data[i] == 'a') chatmill_place(r, i, data[i + 1] & 1);
    }
    const int64_t written[] = {0, ~0, 1}, turn[] = {2, 3 + data[7] % 3};
    const int64_t whole = chatmill_add_leaf(r, written, 3, 0, 0, 1), short_one = chatmill_add_leaf(r, turn, 1 + data[8] % 2, 0, 0, 1);
    const int64_t other = chatmill_add_leaf(r, turn, 0, data[9] == 'e', data[9] & 1, 0);
    const int64_t makes = chatmill_add_node(r, MAKES, 0, 0, 0), loops = chatmill_add_node(r, LOOP, 0, 0, 0);
    chatmill_link(r, 0, 0, makes), chatmill_link(r, makes, 0, loops), chatmill_link(r, loops, 0, ~whole);
    chain(r, 1, 0, short_one), chain(r, 2, 1, other), chain(r, 3, 1, data[10] & 1 ? short_one : other);
    const int64_t messages = data[0] % 10;
    int32_t *classes = room(messages + 1, sizeof *classes);
    for (int64_t i = 0; i <= messages; i++) classes[i] = data[i] % 5;
    const int64_t rendering_count = 2 * messages + 1; /* with probes, and all others */
    rendering *all = room(rendering_count, sizeof *all), *made = all + messages;
    int64_t known = 0;
    for (int again = 0; again < 3; again++) {
        for (int64_t i = 0; i < messages; i++) all[i] = (rendering){.count = i + 2, .probe = messages};
        for (int64_t i = 0; i <= messages; i++) made[i] = (rendering){.count = i, .probe = NO_PROBE};
        const output *outputs;
        chatmill_replay(r, 0, classes, messages, all, rendering_count, &outputs);
        for (int64_t i = 0; i <= messages; i++) known += made[i].ended == KNOWN;
        static int64_t state[MAX_SPACES * MAX_NAMES * (4 + MAX_NUMBERS)];
        int64_t of_turns[9 + MAX_REGISTERS], spaces;
        for (int64_t limit = 0; limit <= messages; limit++) {
            const rendering one = {.count = messages, .probe = NO_PROBE};
            if (chatmill_replay_turns(r, 0, classes, messages, &one, data[11] & 1, limit, of_turns, &outputs) > limit) abort();
            chatmill_state(r, state, &spaces);
        }
        chatmill_replay(r, 0, classes, messages, all, rendering_count, &outputs);
        if (size > 16) look_at_branches(data, all, rendering_count, outputs, classes, messages);
        if (again == 1) chatmill_forget_classes(r);
    }
    free(classes), free(all);
    chatmill_replayer_free(r);
    return known > 0;
}

int main(void)
{
    uint32_t size;
    int64_t copies = 0;
    shape_arrays shapes[] = {shape_of(LIST_NAMES, LISTS, COUNT(LISTS)), shape_of(LIST_NAMES, LISTS, COUNT(LISTS)),
                             shape_of(TURN_NAMES, TURNS, COUNT(TURNS) - 1), shape_of(TURN_NAMES, TURNS, COUNT(TURNS))};
    for (size_t i = COUNT(LISTS); i < COUNT(LISTS) + COUNT(FIELDS); i++) {
        if (shapes[1].meanings[i] == CONTENT) shapes[1].meanings[i] = ONE_CONTENT;
    }
    while (fread(&size, sizeof size, 1, stdin) == 1) {
        uint8_t *data = room(size, 1);
        if (fread(data, 1, size, stdin) != size) return 1;
        for (size_t i = 0; i < COUNT(shapes); i++) {
            scan(data, size, &shapes[i].names, 16, 0);
            scan(data, size, &shapes[i].names, 16, 1);
            scan(data, size, &shapes[i].names, copies % 15 + 1, 0);
        }
        copies += copy(data, size);
        free(data);
    }
    for (size_t i = 0; i < COUNT(shapes); i++) free(shapes[i].text), free(shapes[i].meanings), free(shapes[i].lengths);
    for (int i = 0; i < 4; i++) printf("%" PRId64 " ", totals[i]);
    printf("%" PRId64 " %" PRId64 "\n", copies, renderings_known);
    return 0;
}
