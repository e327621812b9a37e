// mqload: an MQTT 3.1.1 load generator for Linux. One thread, one epoll, many connections, so that the broker is what is
// measured and not its clients.
//
//     cc -O2 -o mqload mqload.c
//     mqload ADDRESS PORT name=value...
//
//     pubs=1          publishing connections
//     subs=0          subscribing connections
//     msgs=100000     messages in total, shared out equally among the publishers
//     qos=0           of the publishers
//     subqos=0        of the subscriptions
//     size=64         bytes of a body, at most 1 MiB; the first 8 carry the time of sending where there is room
//     window=1000     PUBLISHes of one publisher without their acknowledgement (qos > 0)
//     chunk=100       messages per write (qos = 0)
//     topics=1        distinct topics bench/t0, bench/t1, ..., used in turn
//     filter=bench/#  what the subscribers subscribe to
//     timeout=30      seconds after which the run ends, whatever is missing
//
// Subscribers are subscribed, and all connections accepted, before the first message is sent. Ends when every message is sent
// (qos > 0: acknowledged) and delivered to every subscriber, or when nothing was delivered for 5 s. Prints one line of JSON;
// messages missing from `acked` or `delivered` were lost or late. Status 2: the broker refused or closed a connection.
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
    READ_BYTES = 65536,        // room made for each read
    READ_BUFFER_BYTES = 262144,
    LATENCIES_MAX = 5000000,   // deliveries whose latency is kept
    EVENTS_MAX = 512,
    CONNECT_S_MAX = 60,
    QUIET_S_MAX = 5,           // without a delivery, after the last message was sent
};

enum { CONNACK = 2, PUBLISH = 3, PUBACK = 4, PUBREC = 5, PUBREL = 6, PUBCOMP = 7, SUBACK = 9 };

typedef struct {
    int fd;
    int is_subscriber;
    int is_ready;     // CONNACK, or for a subscriber SUBACK, has come
    int wants_write;  // epoll watches for EPOLLOUT
    uint8_t *in;
    size_t in_len, in_cap;
    uint8_t *out;
    size_t out_len, out_from, out_cap;
    long sent, acked, goal;
    int packet_id;
} Connection;

static long pubs = 1, subs = 0, msgs = 100000, qos = 0, subqos = 0, size = 64, window = 1000, chunk = 100, topics = 1;
static long timeout_s = 30;
static char filter[256] = "bench/#";

static int epoll_fd;
static int ready_n;
static long sent_n, acked_n, delivered_n;
static uint64_t *latencies_ns;
static long latencies_n, latencies_cap;
static uint64_t last_delivery_ns;

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

// Write what the socket takes, and have epoll say when it takes the rest.
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

// MQTT 3.1.1, 2.2.3: seven bits a byte, the lowest first.
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
    // Protocol level 4, clean session, keep alive 600 s.
    uint8_t packet[14] = {0x10, 12 + id_len, 0, 4, 'M', 'Q', 'T', 'T', 4, 2, 2, 88, 0, id_len};
    put(c, packet, sizeof packet);
    put(c, id, id_len);
}

static void put_subscribe(Connection *c) {
    size_t filter_len = strlen(filter);
    uint8_t head[8] = {0x82};
    int n = 1 + encode_length(head + 1, 2 + 2 + filter_len + 1);
    uint8_t fields[4] = {0, 1, filter_len >> 8, filter_len};
    uint8_t requested = subqos;
    put(c, head, n);
    put(c, fields, sizeof fields);
    put(c, filter, filter_len);
    put(c, &requested, 1);
}

static void put_publish(Connection *c) {
    static uint8_t body[BODY_BYTES_MAX];
    char topic[64];
    int topic_len = snprintf(topic, sizeof topic, "bench/t%ld", (c->sent + c->goal * 7) % topics);
    uint8_t head[8] = {0x30 | (qos << 1)};
    int n = 1 + encode_length(head + 1, 2 + topic_len + (qos ? 2 : 0) + size);
    uint8_t length[2] = {topic_len >> 8, topic_len};
    put(c, head, n);
    put(c, length, sizeof length);
    put(c, topic, topic_len);
    if (qos) {
        c->packet_id = c->packet_id % 65535 + 1;
        uint8_t packet_id[2] = {c->packet_id >> 8, c->packet_id};
        put(c, packet_id, sizeof packet_id);
    }
    uint64_t sent_ns = now_ns();
    if (size >= 8) memcpy(body, &sent_ns, 8);
    put(c, body, size);
    c->sent++;
    sent_n++;
}

// Send what the window (qos > 0), or one write (qos = 0), has room for.
static void pump(Connection *c) {
    if (c->is_subscriber || !c->is_ready) return;
    if (qos) {
        while (c->sent < c->goal && c->sent - c->acked < window) put_publish(c);
    } else if (c->out_len == 0) {
        for (long i = 0; i < chunk && c->sent < c->goal; i++) put_publish(c);
    }
    flush(c);
}

// --- reading ----------------------------------------------------------------------------------------------------------

static void on_publish(Connection *c, uint8_t first, const uint8_t *packet) {
    int packet_qos = (first >> 1) & 3;
    size_t at = 2 + (packet[0] << 8 | packet[1]);
    if (packet_qos) {
        put_ack(c, packet_qos == 1 ? 0x40 : 0x50, packet + at);
        at += 2;
    }
    delivered_n++;
    last_delivery_ns = now_ns();
    if (size >= 8 && latencies_n < latencies_cap) {
        uint64_t sent_ns;
        memcpy(&sent_ns, packet + at, 8);
        latencies_ns[latencies_n++] = last_delivery_ns - sent_ns;
    }
}

static void on_packet(Connection *c, uint8_t first, const uint8_t *packet) {
    switch (first >> 4) {
    case CONNACK:
        if (packet[1]) {
            fprintf(stderr, "the broker refused a connection with code %d\n", packet[1]);
            exit(2);
        }
        if (c->is_subscriber) {
            put_subscribe(c);
            flush(c);
            break;
        }
        // fall through
    case SUBACK:
        c->is_ready = 1;
        ready_n++;
        break;
    case PUBACK:
    case PUBCOMP:
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

// Handle the whole packets in the buffer, and move the rest to its beginning.
static void parse(Connection *c) {
    size_t at = 0;
    while (at + 2 <= c->in_len) {
        size_t from = at + 1, length = 0;
        int shift = 0, is_whole = 0;
        while (from < c->in_len && !is_whole) {
            uint8_t byte = c->in[from++];
            length |= (size_t)(byte & 127) << shift;
            shift += 7;
            is_whole = !(byte & 128);
        }
        if (!is_whole || from + length > c->in_len) break;
        on_packet(c, c->in[at], c->in + from);
        at = from + length;
    }
    memmove(c->in, c->in + at, c->in_len - at);
    c->in_len -= at;
}

static void on_readable(Connection *c) {
    for (;;) {
        if (c->in_len + READ_BYTES > c->in_cap) {
            c->in_cap = c->in_cap ? c->in_cap * 2 : READ_BUFFER_BYTES;
            c->in = realloc(c->in, c->in_cap);
            if (!c->in) fail("realloc");
        }
        ssize_t n = read(c->fd, c->in + c->in_len, c->in_cap - c->in_len);
        if (n == 0) {
            fprintf(stderr, "the broker closed a connection\n");
            exit(2);
        }
        if (n < 0) {
            if (errno == EAGAIN) break;
            fail("read");
        }
        c->in_len += n;
        parse(c);
        if (n < READ_BYTES) break;
    }
    if (c->out_len) flush(c);
}

// --- the run ----------------------------------------------------------------------------------------------------------

static void parse_arguments(int n, char **arguments) {
    struct {
        const char *name;
        long *value;
    } options[] = {{"pubs", &pubs},     {"subs", &subs},     {"msgs", &msgs},   {"qos", &qos},       {"subqos", &subqos},
                   {"size", &size},     {"window", &window}, {"chunk", &chunk}, {"topics", &topics}, {"timeout", &timeout_s}};
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
            fprintf(stderr, "unknown option %s\n", arguments[i]);
            exit(2);
        }
    }
    if (pubs < 1 || subs < 0 || msgs < pubs || size < 0 || size > BODY_BYTES_MAX || window < 1 || chunk < 1 || topics < 1) {
        fprintf(stderr, "an option is out of its range\n");
        exit(2);
    }
}

static void open_connection(Connection *c, long index, const struct sockaddr_in *address) {
    int on = 1;
    c->is_subscriber = index >= pubs;
    c->goal = msgs / pubs;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (const struct sockaddr *)address, sizeof *address)) fail("connect");
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
        if (sent_n) pump(c);
    }
}

static void connect_all(Connection *connections, const struct sockaddr_in *address) {
    uint64_t began_ns = now_ns();
    for (long i = 0; i < pubs + subs; i++) open_connection(connections + i, i, address);
    while (ready_n < pubs + subs) {
        turn(1000);
        if (now_ns() - began_ns > CONNECT_S_MAX * 1000000000ull) {
            fprintf(stderr, "only %d of %ld connections were accepted in %d s\n", ready_n, pubs + subs, CONNECT_S_MAX);
            exit(2);
        }
    }
}

// Return when the last message was sent (qos > 0: acknowledged).
static uint64_t publish_all(Connection *publishers, long expected, uint64_t began_ns) {
    uint64_t published_ns = 0;
    for (long i = 0; i < pubs; i++) pump(publishers + i);
    for (;;) {
        turn(qos == 0 && sent_n < msgs ? 0 : 100);
        if (qos == 0 && sent_n < msgs)
            for (long i = 0; i < pubs; i++)
                if (publishers[i].out_len == 0) pump(publishers + i);
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

static double latency_us(double quantile) {
    if (!latencies_n) return 0;
    long index = latencies_n * quantile;
    return latencies_ns[index < latencies_n ? index : latencies_n - 1] / 1e3;
}

int main(int n, char **arguments) {
    if (n < 3) {
        fprintf(stderr, "usage: mqload ADDRESS PORT name=value...\n");
        return 2;
    }
    parse_arguments(n, arguments);
    msgs = msgs / pubs * pubs;
    long expected = msgs * subs;
    latencies_cap = expected < LATENCIES_MAX ? expected : LATENCIES_MAX;
    latencies_ns = malloc((latencies_cap + 1) * sizeof *latencies_ns);
    Connection *connections = calloc(pubs + subs, sizeof *connections);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(arguments[2]))};
    if (!latencies_ns || !connections || inet_pton(AF_INET, arguments[1], &address.sin_addr) != 1) {
        fprintf(stderr, "no memory, or %s is no IPv4 address\n", arguments[1]);
        return 2;
    }
    epoll_fd = epoll_create1(0);

    uint64_t connecting_ns = now_ns();
    connect_all(connections, &address);
    uint64_t began_ns = now_ns();
    last_delivery_ns = began_ns;
    uint64_t published_ns = publish_all(connections, expected, began_ns);

    qsort(latencies_ns, latencies_n, sizeof *latencies_ns, by_value);
    double publish_s = (published_ns - began_ns) / 1e9;
    double deliver_s = ((last_delivery_ns > began_ns ? last_delivery_ns : published_ns) - began_ns) / 1e9;
    printf("{\"msgs\":%ld,\"sent\":%ld,\"acked\":%ld,\"delivered\":%ld,\"expected\":%ld,"
           "\"connect_s\":%.3f,\"publish_per_s\":%.0f,\"deliver_per_s\":%.0f,"
           "\"latency_us\":{\"p50\":%.0f,\"p99\":%.0f,\"max\":%.0f}}\n",
           msgs, sent_n, acked_n, delivered_n, expected, (began_ns - connecting_ns) / 1e9,
           (qos ? acked_n : sent_n) / publish_s, expected ? delivered_n / deliver_s : 0.0, latency_us(0.5), latency_us(0.99),
           latency_us(1.0));
    return 0;
}
