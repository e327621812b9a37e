// mqload: an MQTT 3.1.1 load generator for Linux. It serves many connections with one thread and one epoll, so that a benchmark
// measures the broker and not the clients.
//
//     cc -O2 -o mqload mqload.c
//     mqload ADDRESS PORT name=value...
//
//     pubs=1          number of publishing connections
//     subs=0          number of subscribing connections
//     msgs=100000     total number of messages, shared equally among the publishers
//     qos=0           QoS of the messages
//     subqos=0        QoS of the subscriptions
//     size=64         bytes of a body, at most 1 MiB; the first 8 carry the time of sending where there is room
//     window=1000     maximum number of unacknowledged PUBLISHes per publisher (qos > 0), 1 to 65535
//     chunk=100       messages per write (qos = 0)
//     topics=1        distinct topics bench/t0, bench/t1, ..., used in turn
//     filter=bench/#  filter of the subscribers
//     delay=0         seconds by which the broker is to delay each message, which it gets under `$delayed/SECONDS/bench/t...`
//     own=0           1: each reading subscriber subscribes to its own topic instead of the filter; `topics` must be as many
//     lasting=0       1: the sessions of the subscribers outlive their connections
//     login=0         1: log in as the user `bench` with the password `bench`
//     stalled=0       how many of the subscribers subscribe to the filter and then never read; `expected` leaves them out
//     others=0        number of additional filters that match no message, subscribed by connections of their own
//     rate=0          messages a second, each sent when due, however slow the broker is; 0: as fast as windows and writes allow
//     skip=0          number of first deliveries, and of first acknowledgements, whose latency is not counted
//     hold=0          1: connect, print the line, and keep the connections open without sending until standard input ends
//     timeout=30      seconds after which the run ends, even if messages are missing
//
// The first message is sent once all connections are accepted and all subscribers are subscribed. The run ends when every
// message is sent (qos > 0: acknowledged) and delivered to every subscriber, or after 5 s without a delivery. The program
// prints one line of JSON; messages missing from `acked` or `delivered` were lost or late. Exit status 2: the broker refused
// or closed a connection.
//
// `latency_us` is the time from sending to delivery, `ack_us` from sending to the acknowledgement. With a rate, both count from
// the time at which the message was due, even if this program sends it later. So a stall of the broker adds to the latency of
// every message that waits meanwhile.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    BODY_BYTES_MAX = 1 << 20,
    READ_BYTES = 262144,
    TOPIC_BYTES_MAX = 64,
    LATENCIES_MAX = 5000000,  // maximum number of latencies kept, for deliveries and for acknowledgements
    EVENTS_MAX = 512,
    CONNECTING_MAX = 64,      // maximum number of connections being opened; more would meet a full backlog and wait a second
    CONNECT_S_MAX = 60,
    QUIET_S_MAX = 5,          // the run ends after this time without a delivery, once the last message is sent
    STALLED_BYTES = 4096,     // receive buffer of a subscriber that does not read: small, so that messages wait in the broker
    OTHERS_PER_CONNECTION = 500,
    OTHERS_PER_PACKET = 50,
    TICK_MS = 1,              // with a rate, messages that become due within this time are sent together
};

enum { CONNACK = 2, PUBLISH = 3, PUBACK = 4, PUBREC = 5, PUBREL = 6, PUBCOMP = 7, SUBACK = 9 };

typedef enum { PUBLISHER, READER, STALLED, BYSTANDER } Role;

typedef struct {
    int fd;
    Role role;
    long number;      // number among the connections of the same role
    long subacks;     // SUBACKs still to come before the connection is ready
    int is_ready;     // CONNACK has arrived, or for a subscriber every SUBACK
    int wants_write;  // epoll watches for EPOLLOUT
    uint8_t *rest;    // the beginning of a packet that has not arrived in full
    size_t rest_len, rest_cap;
    uint8_t *out;
    size_t out_len, out_from, out_cap;
    long sent, acked, goal;
    int packet_id;
    uint64_t *sent_ns;  // indexed by sent % window; acknowledgements come in the order of sending (MQTT 3.1.1, 4.6)
} Connection;

typedef struct {
    long skipped, n, cap;
    uint64_t *ns;
} Latencies;

static long pubs = 1, subs = 0, msgs = 100000, qos = 0, subqos = 0, size = 64, window = 1000, chunk = 100, topics = 1, delay = 0;
static long own = 0, lasting = 0, login = 0, stalled = 0, others = 0, rate = 0, skip = 0, hold = 0, timeout_s = 30;
static char filter[256] = "bench/#";

static int epoll_fd;
static long ready_n, connections_n;
static long sent_n, acked_n, delivered_n;
static Latencies deliveries, acks;
static uint64_t last_delivery_ns, read_ns;  // read_ns: time of the read whose packets are being handled
// All connections share this buffer, so it stays in the processor's cache.
static uint8_t input[BODY_BYTES_MAX + 256 + READ_BYTES];
static uint8_t (*publish_heads)[TOPIC_BYTES_MAX];  // a PUBLISH up to the end of its topic, by topic
static int *publish_head_lens;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(2);
}

// --- writing ----------------------------------------------------------------------------------------------------------

static void put(Connection *c, const void *data, size_t n) {
    if (c->out_len + n > c->out_cap) {
        c->out_cap = (c->out_len + n) * 2;
        c->out = realloc(c->out, c->out_cap);
        if (!c->out) fail("realloc");
    }
    memcpy(c->out + c->out_len, data, n);
    c->out_len += n;
}

static void put_ack(Connection *c, uint8_t first, const uint8_t *packet_id) {
    uint8_t packet[4] = {first, 2, packet_id[0], packet_id[1]};
    put(c, packet, sizeof packet);
}

// Write as much as the socket accepts, and let epoll report when it accepts the rest.
static void flush(Connection *c) {
    while (c->out_from < c->out_len) {
        ssize_t n = write(c->fd, c->out + c->out_from, c->out_len - c->out_from);
        if (n < 0) {
            if (errno == EAGAIN) break;
            fail("write");
        }
        c->out_from += n;
    }
    if (c->out_from == c->out_len) c->out_from = c->out_len = 0;
    int wants_write = c->out_len > 0;
    if (wants_write == c->wants_write) return;
    c->wants_write = wants_write;
    struct epoll_event event = {.events = EPOLLIN | (wants_write ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

// MQTT 3.1.1, 2.2.3: seven bits per byte, the lowest first.
static int encode_length(uint8_t *to, size_t length) {
    int n = 0;
    do {
        to[n] = length % 128;
        length /= 128;
        if (length) to[n] |= 128;
        n++;
    } while (length);
    return n;
}

static void put_connect(Connection *c, long index) {
    char id[32];
    int id_len = snprintf(id, sizeof id, "ml%d-%ld", getpid() % 10000, index);
    int is_clean = !(lasting && (c->role == READER || c->role == STALLED));
    // Protocol level 4, keep alive 600 s.
    static const uint8_t credentials[] = {0, 5, 'b', 'e', 'n', 'c', 'h', 0, 5, 'b', 'e', 'n', 'c', 'h'};
    int login_len = login ? sizeof credentials : 0;
    uint8_t flags = (is_clean ? 2 : 0) | (login ? 0xC0 : 0);
    uint8_t packet[14] = {0x10, 12 + id_len + login_len, 0, 4, 'M', 'Q', 'T', 'T', 4, flags, 2, 88, 0, id_len};
    put(c, packet, sizeof packet);
    put(c, id, id_len);
    put(c, credentials, login_len);
}

static void put_subscribe(Connection *c, const char *filters[], int n) {
    size_t length = 2;
    for (int i = 0; i < n; i++) length += 2 + strlen(filters[i]) + 1;
    uint8_t head[8] = {0x82};
    put(c, head, 1 + encode_length(head + 1, length));
    c->packet_id++;
    uint8_t packet_id[2] = {c->packet_id >> 8, c->packet_id};
    put(c, packet_id, sizeof packet_id);
    for (int i = 0; i < n; i++) {
        size_t filter_len = strlen(filters[i]);
        uint8_t field_len[2] = {filter_len >> 8, filter_len}, requested = subqos;
        put(c, field_len, sizeof field_len);
        put(c, filters[i], filter_len);
        put(c, &requested, 1);
    }
    c->subacks++;
}

// Subscribe to filters like those of real sessions: half have wildcards, some of them leading ones. None matches bench/t0.
static void put_other_filters(Connection *c) {
    static const char *shapes[] = {"fleet/%ld/state", "site%ld/#", "bench/%ld/other", "+/%ld/+/alarm"};
    static char names[OTHERS_PER_PACKET][64];
    const char *filters[OTHERS_PER_PACKET];
    int n = 0;
    for (long i = c->number * OTHERS_PER_CONNECTION; i < others && i < (c->number + 1) * OTHERS_PER_CONNECTION; i++) {
        snprintf(names[n], sizeof names[n], shapes[i % 4], i);
        filters[n] = names[n];
        if (++n == OTHERS_PER_PACKET) {
            put_subscribe(c, filters, n);
            n = 0;
        }
    }
    if (n) put_subscribe(c, filters, n);
}

static void subscribe(Connection *c) {
    char topic[TOPIC_BYTES_MAX];
    const char *wanted = filter;
    if (c->role == BYSTANDER) {
        put_other_filters(c);
    } else {
        if (own && c->role == READER) {
            snprintf(topic, sizeof topic, "bench/t%ld", c->number);
            wanted = topic;
        }
        put_subscribe(c, &wanted, 1);
    }
    flush(c);
}

static void make_publish_heads(void) {
    publish_heads = calloc(topics, sizeof *publish_heads);
    publish_head_lens = calloc(topics, sizeof *publish_head_lens);
    if (!publish_heads || !publish_head_lens) fail("calloc");
    for (long i = 0; i < topics; i++) {
        char topic[TOPIC_BYTES_MAX - 8];
        int topic_len = delay ? snprintf(topic, sizeof topic, "$delayed/%ld/bench/t%ld", delay, i)
                              : snprintf(topic, sizeof topic, "bench/t%ld", i);
        uint8_t *head = publish_heads[i];
        head[0] = 0x30 | (qos << 1);
        int n = 1 + encode_length(head + 1, 2 + topic_len + (qos ? 2 : 0) + size);
        head[n++] = topic_len >> 8;
        head[n++] = topic_len;
        memcpy(head + n, topic, topic_len);
        publish_head_lens[i] = n + topic_len;
    }
}

static void put_publish(Connection *c, uint64_t sent_ns) {
    static uint8_t body[BODY_BYTES_MAX];
    // Each publisher starts at a different topic, so that few of them send to the same topic at a time.
    long topic = (c->sent + c->number * 7) % topics;
    put(c, publish_heads[topic], publish_head_lens[topic]);
    if (qos) {
        c->packet_id = c->packet_id % 65535 + 1;
        uint8_t packet_id[2] = {c->packet_id >> 8, c->packet_id};
        put(c, packet_id, sizeof packet_id);
        c->sent_ns[c->sent % window] = sent_ns;
    }
    if (size >= 8) memcpy(body, &sent_ns, 8);
    put(c, body, size);
    c->sent++;
    sent_n++;
}

static int has_room(const Connection *c) {
    return c->sent < c->goal && (!qos || c->sent - c->acked < window);
}

// Send as many messages as the window (qos > 0) or one write (qos = 0) has room for.
static void pump(Connection *c) {
    if (c->role != PUBLISHER || !c->is_ready) return;
    uint64_t sent_ns = now_ns();
    if (qos) {
        while (has_room(c)) put_publish(c, sent_ns);
    } else if (c->out_len == 0) {
        for (long i = 0; i < chunk && has_room(c); i++) put_publish(c, sent_ns);
    }
    flush(c);
}

// Send the messages that are due by the rate, shared among the publishers whose window has room.
static void pump_due(Connection *publishers, uint64_t began_ns) {
    static long next;
    long due = (now_ns() - began_ns) * (double)rate / 1e9, full = 0;
    if (due > msgs) due = msgs;
    while (sent_n < due && full < pubs) {
        Connection *c = publishers + next;
        next = (next + 1) % pubs;
        if (has_room(c)) {
            put_publish(c, began_ns + sent_n * 1e9 / rate);
            full = 0;
        } else {
            full++;
        }
    }
    for (long i = 0; i < pubs; i++)
        if (publishers[i].out_len && !publishers[i].wants_write) flush(publishers + i);
}

// --- reading ----------------------------------------------------------------------------------------------------------

static void note(Latencies *latencies, uint64_t sent_ns) {
    if (latencies->skipped < skip)
        latencies->skipped++;
    else if (latencies->n < latencies->cap)
        latencies->ns[latencies->n++] = read_ns - sent_ns;
}

static void on_publish(Connection *c, uint8_t first, const uint8_t *packet) {
    int packet_qos = (first >> 1) & 3;
    size_t at = 2 + (packet[0] << 8 | packet[1]);
    if (packet_qos) {
        put_ack(c, packet_qos == 1 ? 0x40 : 0x50, packet + at);
        at += 2;
    }
    delivered_n++;
    last_delivery_ns = read_ns;
    if (size >= 8) {
        uint64_t sent_ns;
        memcpy(&sent_ns, packet + at, 8);
        note(&deliveries, sent_ns);
    }
}

static void on_ready(Connection *c) {
    c->is_ready = 1;
    ready_n++;
    // From now on, data for this subscriber stays in its receive buffer.
    if (c->role == STALLED) epoll_ctl(epoll_fd, EPOLL_CTL_DEL, c->fd, NULL);
}

static void on_packet(Connection *c, uint8_t first, const uint8_t *packet) {
    switch (first >> 4) {
    case CONNACK:
        if (packet[1]) {
            fprintf(stderr, "The broker refused a connection with code %d\n", packet[1]);
            exit(2);
        }
        if (c->role == PUBLISHER)
            on_ready(c);
        else
            subscribe(c);
        break;
    case SUBACK:
        if (--c->subacks == 0) on_ready(c);
        break;
    case PUBACK:
    case PUBCOMP:
        note(&acks, c->sent_ns[c->acked % window]);
        c->acked++;
        acked_n++;
        break;
    case PUBREC:
        put_ack(c, 0x62, packet);
        break;
    case PUBREL:
        put_ack(c, 0x70, packet);
        break;
    case PUBLISH:
        on_publish(c, first, packet);
        break;
    }
}

// Handle the complete packets among `n` bytes; return the number of bytes handled.
static size_t parse(Connection *c, const uint8_t *bytes, size_t n) {
    size_t at = 0;
    while (at + 2 <= n) {
        size_t from = at + 1, length = 0;
        int shift = 0, is_whole = 0;
        while (from < n && !is_whole) {
            uint8_t byte = bytes[from++];
            length |= (size_t)(byte & 127) << shift;
            shift += 7;
            is_whole = !(byte & 128);
        }
        if (is_whole && length > BODY_BYTES_MAX + 128) {
            fprintf(stderr, "The broker sent a packet of %zu bytes, larger than any published message.\n", length);
            exit(2);
        }
        if (!is_whole || from + length > n) break;
        on_packet(c, bytes[at], bytes + from);
        at = from + length;
    }
    return at;
}

static void keep_rest(Connection *c, const uint8_t *bytes, size_t n) {
    if (n > c->rest_cap) {
        c->rest_cap = n * 2;
        c->rest = realloc(c->rest, c->rest_cap);
        if (!c->rest) fail("realloc");
    }
    if (n) memcpy(c->rest, bytes, n);
    c->rest_len = n;
}

static void on_readable(Connection *c) {
    ssize_t n;
    do {
        if (c->rest_len) memcpy(input, c->rest, c->rest_len);
        n = read(c->fd, input + c->rest_len, READ_BYTES);
        if (n == 0) {
            fprintf(stderr, "The broker closed a connection.\n");
            exit(2);
        }
        if (n < 0) {
            if (errno == EAGAIN) break;
            fail("read");
        }
        read_ns = now_ns();
        size_t length = c->rest_len + n;
        size_t handled = parse(c, input, length);
        keep_rest(c, input + handled, length - handled);
    } while (n == READ_BYTES);
    if (c->out_len) flush(c);
}

// --- the run ----------------------------------------------------------------------------------------------------------

static void parse_arguments(int n, char **arguments) {
    struct {
        const char *name;
        long *value;
    } options[] = {{"pubs", &pubs},     {"subs", &subs},     {"msgs", &msgs},   {"qos", &qos},       {"subqos", &subqos},
                   {"size", &size},     {"window", &window}, {"chunk", &chunk}, {"topics", &topics}, {"own", &own},
                   {"stalled", &stalled}, {"others", &others}, {"rate", &rate}, {"skip", &skip},     {"hold", &hold},
                   {"timeout", &timeout_s}, {"lasting", &lasting}, {"login", &login}, {"delay", &delay}};
    for (int i = 3; i < n; i++) {
        char *value = strchr(arguments[i], '=');
        int is_known = 0;
        if (value) {
            *value++ = 0;
            if (!strcmp(arguments[i], "filter")) {
                snprintf(filter, sizeof filter, "%s", value);
                is_known = 1;
            }
            for (size_t k = 0; k < sizeof options / sizeof *options; k++) {
                if (strcmp(arguments[i], options[k].name)) continue;
                *options[k].value = atol(value);
                is_known = 1;
            }
        }
        if (!is_known) {
            fprintf(stderr, "There is no option %s. The comment at the top of mqload.c lists the options.\n", arguments[i]);
            exit(2);
        }
    }
    if (pubs < 1 || subs < 0 || msgs < pubs || size < 0 || size > BODY_BYTES_MAX || window < 1 || window > 65535 || chunk < 1 ||
        topics < 1 || stalled < 0 || stalled > subs || others < 0 || rate < 0 || delay < 0 || (own && topics != subs - stalled)) {
        fprintf(stderr, "An option is out of its range. The comment at the top of mqload.c gives the bounds.\n");
        exit(2);
    }
}

static void open_connection(Connection *c, long index, const struct sockaddr_in *address) {
    int on = 1, stalled_bytes = STALLED_BYTES;
    long firsts[] = {0, pubs, pubs + subs - stalled, pubs + subs};
    c->role = index < firsts[READER] ? PUBLISHER : index < firsts[STALLED] ? READER : index < firsts[BYSTANDER] ? STALLED : BYSTANDER;
    c->number = index - firsts[c->role];
    if (c->role == PUBLISHER) {
        c->goal = msgs / pubs;
        c->sent_ns = calloc(window, sizeof *c->sent_ns);
        if (!c->sent_ns) fail("calloc");
    }
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0) fail("socket");
    if (c->role == STALLED) setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &stalled_bytes, sizeof stalled_bytes);
    if (connect(c->fd, (const struct sockaddr *)address, sizeof *address)) fail("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
    put_connect(c, index);
    flush(c);
}

static void turn(int wait_ms) {
    struct epoll_event events[EVENTS_MAX];
    int n = epoll_wait(epoll_fd, events, EVENTS_MAX, wait_ms);
    for (int i = 0; i < n; i++) {
        Connection *c = events[i].data.ptr;
        if (events[i].events & EPOLLOUT) flush(c);
        if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) on_readable(c);
        if (sent_n && !rate) pump(c);
    }
}

static void connect_all(Connection *connections, const struct sockaddr_in *address) {
    uint64_t began_ns = now_ns();
    for (long opened = 0; ready_n < connections_n;) {
        while (opened < connections_n && opened - ready_n < CONNECTING_MAX) {
            open_connection(connections + opened, opened, address);
            opened++;
        }
        turn(1000);
        if (now_ns() - began_ns > CONNECT_S_MAX * 1000000000ull) {
            fprintf(stderr, "The broker accepted only %ld of %ld connections in %d s.\n", ready_n, connections_n, CONNECT_S_MAX);
            exit(2);
        }
    }
}

static void publish_what_fits(Connection *publishers, uint64_t began_ns) {
    if (rate) {
        pump_due(publishers, began_ns);
    } else if (!sent_n || !qos) {  // with qos > 0, each acknowledgement makes room for the next message
        for (long i = 0; i < pubs; i++)
            if (publishers[i].out_len == 0) pump(publishers + i);
    }
}

// Return the time at which the last message was sent (qos > 0: acknowledged).
static uint64_t publish_all(Connection *publishers, long expected, uint64_t began_ns) {
    uint64_t published_ns = 0;
    for (;;) {
        if (sent_n < msgs) publish_what_fits(publishers, began_ns);
        turn(sent_n == msgs ? 100 : rate ? TICK_MS : qos ? 100 : 0);
        uint64_t now = now_ns();
        if (!published_ns && (qos ? acked_n : sent_n) >= msgs) published_ns = now;
        if (published_ns && delivered_n >= expected) return published_ns;
        if (now - began_ns > timeout_s * 1000000000ull) return published_ns ? published_ns : now;
        uint64_t last_ns = last_delivery_ns > published_ns ? last_delivery_ns : published_ns;
        if (published_ns && now - last_ns > QUIET_S_MAX * 1000000000ull) return published_ns;
    }
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void reserve(Latencies *latencies, long n) {
    latencies->cap = n < LATENCIES_MAX ? n : LATENCIES_MAX;
    latencies->ns = malloc((latencies->cap + 1) * sizeof *latencies->ns);
    if (!latencies->ns) fail("malloc");
}

static double quantile_us(const Latencies *latencies, double quantile) {
    if (!latencies->n) return 0;
    long index = latencies->n * quantile;
    return latencies->ns[index < latencies->n ? index : latencies->n - 1] / 1e3;
}

static void print_latencies(const char *name, Latencies *latencies) {
    qsort(latencies->ns, latencies->n, sizeof *latencies->ns, by_value);
    printf(",\"%s\":{\"p50\":%.0f,\"p99\":%.0f,\"max\":%.0f}", name, quantile_us(latencies, 0.5),
           quantile_us(latencies, 0.99), quantile_us(latencies, 1.0));
}

// Keep the connections open until standard input ends. Neither side sends anything meanwhile.
static void hold_connections(void) {
    char byte;
    fflush(stdout);
    while (read(STDIN_FILENO, &byte, 1) > 0) continue;
}

int main(int n, char **arguments) {
    if (n < 3) {
        fprintf(stderr, "usage: mqload ADDRESS PORT name=value...\n");
        return 2;
    }
    parse_arguments(n, arguments);
    msgs = msgs / pubs * pubs;
    long expected = own ? msgs : msgs * (subs - stalled);
    connections_n = pubs + subs + (others + OTHERS_PER_CONNECTION - 1) / OTHERS_PER_CONNECTION;
    reserve(&deliveries, expected);
    reserve(&acks, msgs);
    make_publish_heads();
    Connection *connections = calloc(connections_n, sizeof *connections);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(arguments[2]))};
    if (!connections || inet_pton(AF_INET, arguments[1], &address.sin_addr) != 1) {
        fprintf(stderr, "There is not enough memory, or %s is not an IPv4 address.\n", arguments[1]);
        return 2;
    }
    epoll_fd = epoll_create1(0);

    uint64_t connecting_ns = now_ns();
    connect_all(connections, &address);
    uint64_t began_ns = now_ns(), published_ns = began_ns;
    last_delivery_ns = began_ns;
    if (!hold) published_ns = publish_all(connections, expected, began_ns);

    double publish_s = (published_ns - began_ns) / 1e9;
    double deliver_s = ((last_delivery_ns > began_ns ? last_delivery_ns : published_ns) - began_ns) / 1e9;
    printf("{\"msgs\":%ld,\"sent\":%ld,\"acked\":%ld,\"delivered\":%ld,\"expected\":%ld,"
           "\"connect_s\":%.3f,\"publish_per_s\":%.0f,\"deliver_per_s\":%.0f",
           msgs, sent_n, acked_n, delivered_n, expected, (began_ns - connecting_ns) / 1e9,
           publish_s > 0 ? (qos ? acked_n : sent_n) / publish_s : 0.0, deliver_s > 0 ? delivered_n / deliver_s : 0.0);
    print_latencies("latency_us", &deliveries);
    print_latencies("ack_us", &acks);
    printf("}\n");
    if (hold) hold_connections();
    return 0;
}
