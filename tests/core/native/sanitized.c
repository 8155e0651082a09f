/* Runs the compiled part over lines in buffers of their exact size, for the address and undefined-behaviour sanitizers.
 *
 * Standard input: for every line its length (4 bytes, the machine's order) and its bytes.
 * Standard output: lines scanned, lines read, messages, calls, and a sum over all copies.
 */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "columns.c"

static void *room(int64_t count, size_t size)
{
    void *found = malloc((size_t)count * size);
    if (!found && count) abort();
    return found;
}

#define INTS(count) room((count), sizeof(int64_t))

static int64_t totals[4];

static void scan(const uint8_t *data, int64_t size, int64_t listed)
{
    const int64_t lines = chatmill_count_lines(data, 0, size), messages = size / 28, calls = size / 39;
    columns c = {.line_capacity = lines, .message_capacity = messages, .call_capacity = calls};
    int64_t **per_line[] = {&c.line_starts,    &c.line_stops,     &c.id_starts,    &c.id_lengths,
                            &c.source_starts, &c.source_lengths, &c.tools_starts, &c.tools_lengths,
                            &c.listed_starts, &c.listed_lengths};
    int64_t **per_message[] = {&c.content_starts, &c.content_lengths, &c.reasoning_starts, &c.reasoning_lengths};
    int64_t **per_call[] = {&c.name_starts, &c.name_lengths, &c.argument_starts, &c.argument_lengths};
    for (int i = 0; i < 10; i++) *per_line[i] = INTS(lines);
    for (int i = 0; i < 4; i++) *per_message[i] = INTS(messages);
    for (int i = 0; i < 4; i++) *per_call[i] = INTS(calls);
    c.read = room(lines, 1);
    c.roles = room(messages, 1);
    c.named = room(messages, 1);
    c.message_offsets = INTS(lines + 1);
    c.call_offsets = INTS(messages + 1);
    c.text = room(size, 1);
    c.listed_capacity = listed;
    c.listed = room(listed, 1);
    if (chatmill_scan(data, 0, size, &c) != lines) abort();
    totals[0] += lines;
    for (int64_t i = 0; i < lines; i++) totals[1] += c.read[i];
    totals[2] += c.messages;
    totals[3] += c.calls;
    for (int i = 0; i < 10; i++) free(*per_line[i]);
    for (int i = 0; i < 4; i++) free(*per_message[i]);
    for (int i = 0; i < 4; i++) free(*per_call[i]);
    free(c.read), free(c.roles), free(c.named), free(c.message_offsets), free(c.call_offsets), free(c.text), free(c.listed);
}

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
    uint8_t *out = room(total, 1), *wide = room(4 * total, 1);
    const int64_t gathered = chatmill_gather(buffers, sizes, 2, which, starts, lengths, count, 1, out, total);
    const int64_t narrow = chatmill_spread(which, lengths, count, 1, out, total);
    const int64_t broad = chatmill_spread((const uint8_t *)starts, lengths, count, 4, wide, 4 * total);
    int64_t *stops = INTS(count), *text_starts = INTS(count), *text_lengths = INTS(count), bodies = 0;
    for (int64_t i = 0; i < count; i++) {
        stops[i] = starts[i] + lengths[i];
        if (lengths[i] > 0) bodies += lengths[i];
    }
    uint8_t *text = room(bodies + SLACK, 1);
    sum += chatmill_unescape(data, size, starts, stops, count, text, text_starts, text_lengths) > 0;
    free(stops), free(text_starts), free(text_lengths), free(text);
    int64_t found[2];
    sum += chatmill_find(data, size, (const uint8_t *)"\"role", 5, found, 2) > 0;
    sum += (gathered == total) + (narrow == total) + (broad == 4 * total);
    free(second), free(which), free(starts), free(lengths), free(out), free(wide);
    return sum;
}

int main(void)
{
    uint32_t size;
    int64_t copies = 0;
    while (fread(&size, sizeof size, 1, stdin) == 1) {
        uint8_t *data = room(size, 1);
        if (fread(data, 1, size, stdin) != size) return 1;
        scan(data, size, copies % 2 ? 2 * (int64_t)size : size / 16); /* room enough, and mostly too little */
        copies += copy(data, size);
        free(data);
    }
    for (int i = 0; i < 4; i++) printf("%" PRId64 " ", totals[i]);
    printf("%" PRId64 "\n", copies);
    return 0;
}
