// The official Java client of RocketMQ as a process: understands the lines that ../rocketmq_driver.py understands.
// It compiles against each of the versions 5.0.7 to 5.2.0. What only some of them have is called by its name.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Deque;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.MessageListener;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.shaded.com.google.gson.Gson;

public class Driver {
    private static final Gson JSON = new Gson();
    private static final Pattern CODE = Pattern.compile("response-code=(\\d+)");

    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final ClientConfiguration configuration;
    private final Map<String, MessageView> received = new HashMap<>();
    private final Deque<Transaction> transactions = new ArrayDeque<>();
    private final List<String> checked = Collections.synchronizedList(new ArrayList<>());
    private List<Map<String, Object>> begun = new ArrayList<>();
    private List<Map<String, Object>> done = new ArrayList<>();
    private Producer producer;
    private AutoCloseable consumer;

    Driver(String target, String key, String secret, String namespace, boolean tls) {
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder().setEndpoints(target);
        if (!key.isEmpty()) {
            builder.setCredentialProvider(new StaticSessionCredentialsProvider(key, secret));
        }
        if (!namespace.isEmpty()) {
            builder.setNamespace(namespace);
        }
        if (!tls) {
            builder.enableSsl(false);
        }
        configuration = builder.build();
    }

    private static Map<String, Object> told(MessageView message) throws Exception {
        byte[] body = new byte[message.getBody().remaining()];
        message.getBody().get(body);
        Map<String, Object> fields = new HashMap<>();
        fields.put("topic", message.getTopic());
        fields.put("body", new String(body, StandardCharsets.UTF_8));
        fields.put("id", message.getMessageId().toString());
        fields.put("tag", message.getTag().orElse(""));
        fields.put("keys", new ArrayList<>(new TreeSet<>(message.getKeys())));
        fields.put("properties", message.getProperties());
        fields.put("group", message.getMessageGroup().orElse(""));
        fields.put("attempt", message.getDeliveryAttempt());
        fields.put("born_ms", message.getBornTimestamp());
        fields.put("born_host", message.getBornHost());
        fields.put("lite", "");
        fields.put("corrupted", false);
        try {
            Object lite = MessageView.class.getMethod("getLiteTopic").invoke(message);
            fields.put("lite", ((java.util.Optional<?>) lite).map(Object::toString).orElse(""));
        } catch (NoSuchMethodException older) {
            // This version has no lite topics.
        }
        return fields;
    }

    private Message message(Map<String, Object> wish) throws Exception {
        MessageBuilder builder = provider.newMessageBuilder().setTopic((String) wish.get("topic"))
            .setBody(((String) wish.get("body")).repeat(((Number) wish.getOrDefault("times", 1)).intValue())
                .getBytes(StandardCharsets.UTF_8));
        if (wish.get("tag") != null) {
            builder.setTag((String) wish.get("tag"));
        }
        List<?> keys = (List<?>) wish.get("keys");
        if (keys != null) {
            builder.setKeys(keys.stream().map(Object::toString).toArray(String[]::new));
        }
        Map<?, ?> properties = (Map<?, ?>) wish.getOrDefault("properties", Map.of());
        properties.forEach((name, value) -> builder.addProperty((String) name, (String) value));
        if (wish.get("group") != null) {
            builder.setMessageGroup((String) wish.get("group"));
        }
        if (wish.get("at_s") != null) {
            builder.setDeliveryTimestamp(((Number) wish.get("at_s")).longValue() * 1000);
        }
        if (wish.get("priority") != null) {
            MessageBuilder.class.getMethod("setPriority", int.class).invoke(builder, ((Number) wish.get("priority")).intValue());
        }
        if (wish.get("lite") != null) {
            MessageBuilder.class.getMethod("setLiteTopic", String.class).invoke(builder, wish.get("lite"));
        }
        return builder.build();
    }

    private MessageListener listener(Map<?, ?> failing, double slowS) {
        begun = Collections.synchronizedList(new ArrayList<>());
        done = Collections.synchronizedList(new ArrayList<>());
        Map<String, Integer> left = new ConcurrentHashMap<>();
        failing.forEach((body, count) -> left.put((String) body, ((Number) count).intValue()));
        return message -> {
            try {
                Map<String, Object> found = told(message);
                begun.add(found);
                Thread.sleep((long) (slowS * 1000));
                if (left.merge((String) found.get("body"), -1, Integer::sum) >= 0) {
                    return ConsumeResult.FAILURE;
                }
                done.add(found);
                return ConsumeResult.SUCCESS;
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
        };
    }

    private static Map<String, FilterExpression> subscriptions(Map<String, Object> wish) {
        FilterExpressionType type =
            Boolean.TRUE.equals(wish.get("sql")) ? FilterExpressionType.SQL92 : FilterExpressionType.TAG;
        Map<String, FilterExpression> found = new HashMap<>();
        ((Map<?, ?>) wish.get("topics")).forEach(
            (topic, text) -> found.put((String) topic, new FilterExpression((String) text, type)));
        return found;
    }

    private Map<String, Object> serve(Map<String, Object> wish) throws Exception {
        switch ((String) wish.get("do")) {
            case "producer": {
                List<?> undecided = (List<?>) wish.getOrDefault("undecided", List.of());
                producer = provider.newProducerBuilder().setClientConfiguration(configuration)
                    .setTopics(((List<?>) wish.get("topics")).toArray(new String[0]))
                    .setTransactionChecker(message -> {
                        byte[] body = new byte[message.getBody().remaining()];
                        message.getBody().get(body);
                        String text = new String(body, StandardCharsets.UTF_8);
                        checked.add(text);
                        return undecided.contains(text) ? TransactionResolution.UNKNOWN : TransactionResolution.COMMIT;
                    }).build();
                return Map.of();
            }
            case "send": {
                SendReceipt receipt = producer.send(message(wish));
                Object recall = "";
                try {
                    recall = SendReceipt.class.getMethod("getRecallHandle").invoke(receipt);
                } catch (NoSuchMethodException older) {
                    // This version can't recall.
                }
                return Map.of("id", receipt.getMessageId().toString(), "recall", recall == null ? "" : recall);
            }
            case "recall": {
                Object receipt;
                try {
                    receipt = Producer.class.getMethod("recallMessage", String.class, String.class)
                        .invoke(producer, wish.get("topic"), wish.get("handle"));
                } catch (java.lang.reflect.InvocationTargetException error) {
                    throw (Exception) error.getCause();
                }
                Class<?> kind = Class.forName("org.apache.rocketmq.client.apis.producer.RecallReceipt");
                return Map.of("id", kind.getMethod("getMessageId").invoke(receipt).toString());
            }
            case "begin": {
                Transaction transaction = producer.beginTransaction();
                SendReceipt receipt = producer.send(message(wish), transaction);
                transactions.push(transaction);
                return Map.of("id", receipt.getMessageId().toString());
            }
            case "end": {
                Transaction transaction = transactions.pop();
                if (Boolean.TRUE.equals(wish.get("commit"))) {
                    transaction.commit();
                } else {
                    transaction.rollback();
                }
                return Map.of();
            }
            case "checked":
                return Map.of("bodies", new ArrayList<>(checked));
            case "simple": {
                consumer = provider.newSimpleConsumerBuilder().setClientConfiguration(configuration)
                    .setConsumerGroup((String) wish.get("group")).setSubscriptionExpressions(subscriptions(wish))
                    .setAwaitDuration(Duration.ofSeconds(((Number) wish.getOrDefault("wait_s", 5)).longValue())).build();
                return Map.of();
            }
            case "receive": {
                List<MessageView> messages = ((SimpleConsumer) consumer).receive(
                    ((Number) wish.getOrDefault("count", 32)).intValue(),
                    Duration.ofSeconds(((Number) wish.getOrDefault("invisible_s", 30)).longValue()));
                List<Map<String, Object>> found = new ArrayList<>();
                for (MessageView message : messages) {
                    received.put(message.getMessageId().toString(), message);
                    found.add(told(message));
                }
                return Map.of("messages", found);
            }
            case "ack":
                ((SimpleConsumer) consumer).ack(received.get((String) wish.get("id")));
                return Map.of();
            case "change":
                ((SimpleConsumer) consumer).changeInvisibleDuration(received.get((String) wish.get("id")),
                    Duration.ofSeconds(((Number) wish.get("invisible_s")).longValue()));
                return Map.of();
            case "push":
                consumer = provider.newPushConsumerBuilder().setClientConfiguration(configuration)
                    .setConsumerGroup((String) wish.get("group")).setSubscriptionExpressions(subscriptions(wish))
                    .setMessageListener(listener((Map<?, ?>) wish.getOrDefault("failing", Map.of()),
                        ((Number) wish.getOrDefault("slow_s", 0)).doubleValue())).build();
                return Map.of();
            case "pushed":
                return Map.of("begun", new ArrayList<>(begun), "done", new ArrayList<>(done));
            case "lite_push": {
                Object builder = ClientServiceProvider.class.getMethod("newLitePushConsumerBuilder").invoke(provider);
                Class<?> kind = Class.forName("org.apache.rocketmq.client.apis.consumer.LitePushConsumerBuilder");
                kind.getMethod("setClientConfiguration", ClientConfiguration.class).invoke(builder, configuration);
                kind.getMethod("setConsumerGroup", String.class).invoke(builder, wish.get("group"));
                kind.getMethod("bindTopic", String.class).invoke(builder, wish.get("parent"));
                kind.getMethod("setMessageListener", MessageListener.class).invoke(builder, listener(Map.of(), 0));
                consumer = (AutoCloseable) kind.getMethod("build").invoke(builder);
                Class<?> made = Class.forName("org.apache.rocketmq.client.apis.consumer.LitePushConsumer");
                for (Object lite : (List<?>) wish.get("lite")) {
                    made.getMethod("subscribeLite", String.class).invoke(consumer, lite);
                }
                return Map.of();
            }
            case "lite_topics": {
                Class<?> made = Class.forName("org.apache.rocketmq.client.apis.consumer.LitePushConsumer");
                return Map.of("names", made.getMethod("getLiteTopicSet").invoke(consumer));
            }
            case "stop":
                if (consumer != null) {
                    consumer.close();
                }
                if (producer != null) {
                    producer.close();
                }
                consumer = null;
                producer = null;
                return Map.of();
            default:
                throw new IllegalArgumentException("unknown: " + wish.get("do"));
        }
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        boolean tls = !"0".equals(System.getenv("DRIVER_TLS"));
        Driver driver = new Driver(arguments[0], arguments[1], arguments[2], arguments[3], tls);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Map<String, Object> answer;
            try {
                answer = driver.serve(JSON.fromJson(line, Map.class));
            } catch (Exception error) {
                Matcher code = CODE.matcher(error.toString());
                answer = Map.of("error", error.toString(), "code", code.find() ? Integer.parseInt(code.group(1)) : 0);
            }
            out.println(JSON.toJson(answer));
        }
        Runtime.getRuntime().halt(0);
    }
}
