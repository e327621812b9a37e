import java.util.Collections;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.producer.Producer;

/**
 * Sends messages, consumes them with RocketMQ's own worker, whose handlers do nothing, and prints how many it consumed in how
 * many seconds, from the first to the last one. Arguments: ADDRESS TOPIC GROUP COUNT WARM-UP MESSAGE-GROUP THREADS. Without a
 * message group ("-") the messages are in no order.
 */
public class RocketmqWorker {
    static final int BODY_BYTES = 64;
    static final int IN_FLIGHT = 128;
    static final long LIMIT_S = 300;

    public static void main(String[] arguments) throws Exception {
        String topic = arguments[1];
        String group = arguments[2];
        long count = Long.parseLong(arguments[3]);
        long warmUp = Long.parseLong(arguments[4]);
        String order = arguments[5];
        ClientServiceProvider provider = ClientServiceProvider.loadService();
        ClientConfiguration configuration =
            ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(false).build();
        try (Producer producer = provider.newProducerBuilder().setClientConfiguration(configuration).setTopics(topic).build()) {
            Semaphore room = new Semaphore(IN_FLIGHT);
            for (long sent = 0; sent < count + warmUp; sent++) {
                MessageBuilder message = provider.newMessageBuilder().setTopic(topic).setBody(new byte[BODY_BYTES]);
                if (!order.equals("-")) {
                    producer.send(message.setMessageGroup(order).build());
                    continue;
                }
                room.acquire();
                CompletableFuture<?> sending = producer.sendAsync(message.build());
                sending.whenComplete((receipt, error) -> {
                    if (error != null) {
                        error.printStackTrace();
                        System.exit(1);
                    }
                    room.release();
                });
            }
            room.acquire(IN_FLIGHT);
        }
        AtomicLong handled = new AtomicLong();
        AtomicLong beganNs = new AtomicLong();
        AtomicLong endedNs = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        PushConsumer consumer = provider.newPushConsumerBuilder().setClientConfiguration(configuration).setConsumerGroup(group)
            .setSubscriptionExpressions(Collections.singletonMap(topic, FilterExpression.SUB_ALL))
            .setConsumptionThreadCount(Integer.parseInt(arguments[6])).setMessageListener(message -> {
                long number = handled.incrementAndGet();
                if (number == warmUp + 1) {
                    beganNs.set(System.nanoTime());
                } else if (number == count + warmUp) {
                    endedNs.set(System.nanoTime());
                    done.countDown();
                }
                return ConsumeResult.SUCCESS;
            }).build();
        boolean isDone = done.await(LIMIT_S, TimeUnit.SECONDS);
        if (!isDone) {
            System.err.println("only " + handled.get() + " messages came within " + LIMIT_S + " s");
            System.exit(1);
        }
        System.out.println(count + " " + (endedNs.get() - beganNs.get()) / 1e9);
        System.out.flush();
        Runtime.getRuntime().halt(0);  // The consumer takes half a minute to close.
    }
}
