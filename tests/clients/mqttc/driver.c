// Mosquitto's client library, of which mosquitto_pub and mosquitto_sub are made: a client that does what the lines on stdin say, and
// answers each with one line. The first argument names the version of MQTT: mosquitto-3 or mosquitto-5.
// tests/clients/mqtt_processes.py drives this, and says what the lines mean.
#include <mosquitto.h>
#include <mqtt_protocol.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { WAIT_S = 20, BODY_MAX = 1000, WORDS_MAX = 5 };

struct message {
    struct message *next;
    char *text;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

// What the callbacks have told, all under the lock.
static struct message *first, **last = &first;
static int waiting, greeted = -1, present, answered_mid = -1, answered_code, published_mid = -1;
static long acked;

static struct mosquitto *client;
static bool is_v5;

static void on_connect(struct mosquitto *m, void *o, int code, int flags, const mosquitto_property *p) {
    (void)m, (void)o, (void)p;
    pthread_mutex_lock(&lock);
    if (greeted < 0) {
        greeted = code;
        present = flags & 1;
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void on_message(struct mosquitto *m, void *o, const struct mosquitto_message *found) {
    (void)m, (void)o;
    struct message *one = calloc(1, sizeof *one);
    int size = found->payloadlen > BODY_MAX ? 0 : found->payloadlen;
    char shown[BODY_MAX + 32];
    if (found->payloadlen > BODY_MAX)
        snprintf(shown, sizeof shown, "#%d", found->payloadlen);
    else
        snprintf(shown, sizeof shown, "%.*s", size, (const char *)found->payload);
    if (!one || asprintf(&one->text, "%s %d %d %s", *found->topic ? found->topic : "-", found->qos, found->retain, shown) < 0)
        abort();
    pthread_mutex_lock(&lock);
    *last = one;
    last = &one->next;
    waiting++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void on_subscribe(struct mosquitto *m, void *o, int mid, int count, const int *granted) {
    (void)m, (void)o;
    pthread_mutex_lock(&lock);
    answered_mid = mid;
    answered_code = count ? granted[0] : -1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void on_publish(struct mosquitto *m, void *o, int mid) {
    (void)m, (void)o;
    pthread_mutex_lock(&lock);
    published_mid = mid;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

// Waits, with the lock, until the callbacks have set a number; returns whether they have done so in time.
static bool until(const int *number, int wanted, bool for_ever) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += WAIT_S;
    while (*number != wanted)
        if (for_ever)
            pthread_cond_wait(&changed, &lock);
        else if (pthread_cond_timedwait(&changed, &lock, &end))
            return false;
    return true;
}

static bool publish(const char *topic, int qos, bool retain, int size, const void *body, bool for_ever) {
    int mid;
    // The lock is held, so that the acknowledgement can't come before its number is known.
    pthread_mutex_lock(&lock);
    int error = mosquitto_publish(client, &mid, topic, size, body, qos, retain);
    bool is_done = !error && until(&published_mid, mid, for_ever);
    pthread_mutex_unlock(&lock);
    return is_done;
}

struct stream {
    char *topic;
    long count;
};

static void *run_stream(void *argument) {
    struct stream *wanted = argument;
    for (long number = 0; number < wanted->count;) {
        char body[32];
        int size = snprintf(body, sizeof body, "%ld", number);
        if (publish(wanted->topic, 1, false, size, body, true)) {
            number++;
            pthread_mutex_lock(&lock);
            acked = number;
            pthread_mutex_unlock(&lock);
        } else {
            usleep(20000); // The connection is lost: the library connects again by itself.
        }
    }
    return NULL;
}

static int connect_to(const char *port, const char *id, bool clean, const char *will) {
    client = mosquitto_new(id, clean, NULL);
    mosquitto_int_option(client, MOSQ_OPT_PROTOCOL_VERSION, is_v5 ? MQTT_PROTOCOL_V5 : MQTT_PROTOCOL_V311);
    mosquitto_connect_v5_callback_set(client, on_connect);
    mosquitto_message_callback_set(client, on_message);
    mosquitto_subscribe_callback_set(client, on_subscribe);
    mosquitto_publish_callback_set(client, on_publish);
    mosquitto_reconnect_delay_set(client, 1, 1, false);
    if (strcmp(will, "-"))
        mosquitto_will_set(client, will, 4, "gone", 1, false);
    mosquitto_property *properties = NULL;
    if (is_v5 && !clean)
        mosquitto_property_add_int32(&properties, MQTT_PROP_SESSION_EXPIRY_INTERVAL, 60);
    int error = mosquitto_connect_bind_v5(client, "127.0.0.1", atoi(port), 30, NULL, properties);
    mosquitto_property_free_all(&properties);
    if (error || mosquitto_loop_start(client))
        return -1;
    pthread_mutex_lock(&lock);
    bool is_greeted = until(&greeted, 0, false);
    pthread_mutex_unlock(&lock);
    return is_greeted ? present : -1;
}

static void fail(const char *why) {
    printf("error %s\n", why);
}

static void follow(char **words) {
    const char *verb = words[0];
    if (!strcmp(verb, "connect")) {
        int was = connect_to(words[1], words[2], *words[3] == '1', words[4]);
        was < 0 ? fail("no answer came") : (void)printf("ok %d\n", was);
    } else if (!strcmp(verb, "subscribe")) {
        int mid;
        pthread_mutex_lock(&lock);
        int error = mosquitto_subscribe(client, &mid, words[1], atoi(words[2]));
        bool is_answered = !error && until(&answered_mid, mid, false);
        int code = answered_code;
        pthread_mutex_unlock(&lock);
        is_answered ? (void)printf("ok %d\n", code) : fail(error ? mosquitto_strerror(error) : "no answer came");
    } else if (!strcmp(verb, "publish")) {
        bool is_done = publish(words[1], atoi(words[2]), *words[3] == '1', (int)strlen(words[4]), words[4], false);
        is_done ? (void)puts("ok ") : fail("no acknowledgement came");
    } else if (!strcmp(verb, "blob")) {
        int size = atoi(words[2]);
        void *body = calloc(1, size);
        publish(words[1], 1, false, size, body, false) ? (void)puts("ok ") : fail("no acknowledgement came");
        free(body);
    } else if (!strcmp(verb, "next")) {
        struct timespec end;
        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_sec += WAIT_S;
        pthread_mutex_lock(&lock);
        while (!first && !pthread_cond_timedwait(&changed, &lock, &end))
            ;
        struct message *one = first;
        if (one) {
            first = one->next;
            waiting--;
            if (!first)
                last = &first;
        }
        pthread_mutex_unlock(&lock);
        one ? (void)printf("ok %s\n", one->text) : fail("no message came");
        if (one) {
            free(one->text);
            free(one);
        }
    } else if (!strcmp(verb, "waiting") || !strcmp(verb, "acked")) {
        pthread_mutex_lock(&lock);
        printf("ok %ld\n", *verb == 'w' ? (long)waiting : acked);
        pthread_mutex_unlock(&lock);
    } else if (!strcmp(verb, "stream")) {
        static struct stream wanted;
        pthread_t thread;
        wanted = (struct stream){strdup(words[1]), atol(words[2])};
        pthread_create(&thread, NULL, run_stream, &wanted);
        puts("ok ");
    } else if (!strcmp(verb, "end")) {
        mosquitto_disconnect(client);
        mosquitto_loop_stop(client, false);
        puts("ok ");
    } else {
        fail("unknown command");
    }
}

int main(int argc, char **argv) {
    char line[4096];
    is_v5 = argc > 1 && strlen(argv[1]) && argv[1][strlen(argv[1]) - 1] == '5';
    setvbuf(stdout, NULL, _IOLBF, 0);
    mosquitto_lib_init();
    while (fgets(line, sizeof line, stdin)) {
        char *words[WORDS_MAX] = {"", "", "", "", ""}, *rest = line;
        line[strcspn(line, "\n")] = 0;
        for (int at = 0; at < WORDS_MAX && rest; at++)
            words[at] = strsep(&rest, " ");
        follow(words);
    }
    return 0;
}
