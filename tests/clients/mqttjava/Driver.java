// Clients for MQTT in Java that do what the lines on stdin say, and answer each with one line. The first argument names the client:
// hivemq-3, hivemq-5, paho-3 or paho-5. tests/clients/mqtt_processes.py drives this, and says what the lines mean.
import com.hivemq.client.mqtt.MqttClient;
import com.hivemq.client.mqtt.datatypes.MqttQos;
import com.hivemq.client.mqtt.mqtt3.Mqtt3AsyncClient;
import com.hivemq.client.mqtt.mqtt3.exceptions.Mqtt3SubAckException;
import com.hivemq.client.mqtt.mqtt3.message.publish.Mqtt3Publish;
import com.hivemq.client.mqtt.mqtt5.Mqtt5AsyncClient;
import com.hivemq.client.mqtt.mqtt5.exceptions.Mqtt5SubAckException;
import com.hivemq.client.mqtt.mqtt5.message.publish.Mqtt5Publish;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

public class Driver {
    static final long WAIT_S = 20;
    static final long ACK_WAIT_S = 5; // Then the stream sends the message again.
    static final BlockingQueue<String> messages = new LinkedBlockingQueue<>();
    static volatile int acked = 0;

    interface Client {
        boolean connect(int port, String id, boolean clean, String will) throws Exception;

        int subscribe(String filter, int qos) throws Exception;

        void publish(String topic, int qos, boolean retain, byte[] body) throws Exception;

        void end() throws Exception;
    }

    static void got(String topic, int qos, boolean retain, byte[] body) {
        String shown = body.length > 1000 ? "#" + body.length : new String(body, StandardCharsets.UTF_8);
        messages.add((topic.isEmpty() ? "-" : topic) + " " + qos + " " + (retain ? 1 : 0) + " " + shown);
    }

    static <T> T wait(CompletableFuture<T> future) throws Exception {
        return future.get(WAIT_S, TimeUnit.SECONDS);
    }

    static class HiveMq5 implements Client {
        Mqtt5AsyncClient client;

        public boolean connect(int port, String id, boolean clean, String will) throws Exception {
            client = MqttClient.builder().useMqttVersion5().identifier(id).serverHost("127.0.0.1").serverPort(port)
                .automaticReconnect().initialDelay(50, TimeUnit.MILLISECONDS).maxDelay(200, TimeUnit.MILLISECONDS)
                .applyAutomaticReconnect().buildAsync();
            client.publishes(com.hivemq.client.mqtt.MqttGlobalPublishFilter.ALL,
                found -> got(found.getTopic().toString(), found.getQos().getCode(), found.isRetain(), found.getPayloadAsBytes()));
            var connect = client.connectWith().cleanStart(clean).sessionExpiryInterval(clean ? 0 : 60)
                .restrictions().topicAliasMaximum(10).applyRestrictions();
            if (!will.equals("-")) {
                connect = connect.willPublish().topic(will).payload("gone".getBytes()).qos(MqttQos.AT_LEAST_ONCE).applyWillPublish();
            }
            return Driver.wait(connect.send()).isSessionPresent();
        }

        public int subscribe(String filter, int qos) throws Exception {
            try {
                return Driver.wait(client.subscribeWith().topicFilter(filter).qos(MqttQos.fromCode(qos)).send())
                    .getReasonCodes().get(0).getCode();
            } catch (ExecutionException error) {
                if (error.getCause() instanceof Mqtt5SubAckException refused) {
                    return refused.getMqttMessage().getReasonCodes().get(0).getCode();
                }
                throw error;
            }
        }

        public void publish(String topic, int qos, boolean retain, byte[] body) throws Exception {
            var message = Mqtt5Publish.builder().topic(topic).qos(MqttQos.fromCode(qos)).retain(retain).payload(body).build();
            Driver.wait(client.publish(message)).getError().ifPresent(error -> {
                throw new IllegalStateException(error);
            });
        }

        public void end() throws Exception {
            Driver.wait(client.disconnect());
        }
    }

    static class HiveMq3 implements Client {
        Mqtt3AsyncClient client;

        public boolean connect(int port, String id, boolean clean, String will) throws Exception {
            client = MqttClient.builder().useMqttVersion3().identifier(id).serverHost("127.0.0.1").serverPort(port)
                .automaticReconnect().initialDelay(50, TimeUnit.MILLISECONDS).maxDelay(200, TimeUnit.MILLISECONDS)
                .applyAutomaticReconnect().buildAsync();
            client.publishes(com.hivemq.client.mqtt.MqttGlobalPublishFilter.ALL,
                found -> got(found.getTopic().toString(), found.getQos().getCode(), found.isRetain(), found.getPayloadAsBytes()));
            var connect = client.connectWith().cleanSession(clean);
            if (!will.equals("-")) {
                connect = connect.willPublish().topic(will).payload("gone".getBytes()).qos(MqttQos.AT_LEAST_ONCE).applyWillPublish();
            }
            return Driver.wait(connect.send()).isSessionPresent();
        }

        public int subscribe(String filter, int qos) throws Exception {
            try {
                return Driver.wait(client.subscribeWith().topicFilter(filter).qos(MqttQos.fromCode(qos)).send())
                    .getReturnCodes().get(0).getCode();
            } catch (ExecutionException error) {
                if (error.getCause() instanceof Mqtt3SubAckException refused) {
                    return refused.getMqttMessage().getReturnCodes().get(0).getCode();
                }
                throw error;
            }
        }

        public void publish(String topic, int qos, boolean retain, byte[] body) throws Exception {
            Driver.wait(client.publish(
                Mqtt3Publish.builder().topic(topic).qos(MqttQos.fromCode(qos)).retain(retain).payload(body).build()));
        }

        public void end() throws Exception {
            Driver.wait(client.disconnect());
        }
    }

    static class Paho5 implements Client, org.eclipse.paho.mqttv5.client.MqttCallback {
        org.eclipse.paho.mqttv5.client.MqttAsyncClient client;

        public boolean connect(int port, String id, boolean clean, String will) throws Exception {
            client = new org.eclipse.paho.mqttv5.client.MqttAsyncClient("tcp://127.0.0.1:" + port, id,
                new org.eclipse.paho.mqttv5.client.persist.MemoryPersistence());
            client.setCallback(this);
            var options = new org.eclipse.paho.mqttv5.client.MqttConnectionOptions();
            options.setCleanStart(clean);
            options.setSessionExpiryInterval(clean ? 0L : 60L);
            options.setTopicAliasMaximum(10);
            options.setAutomaticReconnect(true);
            options.setAutomaticReconnectDelay(1, 1);
            if (!will.equals("-")) {
                options.setWill(will, new org.eclipse.paho.mqttv5.common.MqttMessage("gone".getBytes(), 1, false, null));
            }
            var token = client.connect(options);
            token.waitForCompletion(WAIT_S * 1000);
            return token.getSessionPresent();
        }

        public int subscribe(String filter, int qos) throws Exception {
            var token = client.subscribe(filter, qos);
            try {
                token.waitForCompletion(WAIT_S * 1000);
            } catch (org.eclipse.paho.mqttv5.common.MqttException error) {
                if (token.getReasonCodes() == null) throw error;
            }
            return token.getReasonCodes()[0];
        }

        public void publish(String topic, int qos, boolean retain, byte[] body) throws Exception {
            client.publish(topic, body, qos, retain).waitForCompletion(ACK_WAIT_S * 1000);
        }

        public void end() throws Exception {
            client.disconnect().waitForCompletion(WAIT_S * 1000);
            client.close();
        }

        public void messageArrived(String topic, org.eclipse.paho.mqttv5.common.MqttMessage found) {
            got(topic, found.getQos(), found.isRetained(), found.getPayload());
        }

        public void disconnected(org.eclipse.paho.mqttv5.client.MqttDisconnectResponse response) {}

        public void mqttErrorOccurred(org.eclipse.paho.mqttv5.common.MqttException error) {}

        public void deliveryComplete(org.eclipse.paho.mqttv5.client.IMqttToken token) {}

        public void connectComplete(boolean again, String uri) {}

        public void authPacketArrived(int reason, org.eclipse.paho.mqttv5.common.packet.MqttProperties properties) {}
    }

    static class Paho3 implements Client, org.eclipse.paho.client.mqttv3.MqttCallback {
        org.eclipse.paho.client.mqttv3.MqttAsyncClient client;

        public boolean connect(int port, String id, boolean clean, String will) throws Exception {
            client = new org.eclipse.paho.client.mqttv3.MqttAsyncClient("tcp://127.0.0.1:" + port, id,
                new org.eclipse.paho.client.mqttv3.persist.MemoryPersistence());
            client.setCallback(this);
            var options = new org.eclipse.paho.client.mqttv3.MqttConnectOptions();
            options.setCleanSession(clean);
            options.setAutomaticReconnect(true);
            options.setMaxReconnectDelay(1000);
            if (!will.equals("-")) options.setWill(will, "gone".getBytes(), 1, false);
            var token = client.connect(options);
            token.waitForCompletion(WAIT_S * 1000);
            return token.getSessionPresent();
        }

        public int subscribe(String filter, int qos) throws Exception {
            var token = client.subscribe(filter, qos);
            token.waitForCompletion(WAIT_S * 1000);
            return token.getGrantedQos()[0];
        }

        public void publish(String topic, int qos, boolean retain, byte[] body) throws Exception {
            client.publish(topic, body, qos, retain).waitForCompletion(ACK_WAIT_S * 1000);
        }

        public void end() throws Exception {
            client.disconnect().waitForCompletion(WAIT_S * 1000);
            client.close();
        }

        public void messageArrived(String topic, org.eclipse.paho.client.mqttv3.MqttMessage found) {
            got(topic, found.getQos(), found.isRetained(), found.getPayload());
        }

        public void connectionLost(Throwable cause) {}

        public void deliveryComplete(org.eclipse.paho.client.mqttv3.IMqttDeliveryToken token) {}
    }

    static void stream(Client client, String topic, int count) {
        while (acked < count) {
            try {
                client.publish(topic, 1, false, Integer.toString(acked).getBytes());
                acked++;
            } catch (Exception error) { // The connection is lost: the client connects again by itself.
                try {
                    Thread.sleep(20);
                } catch (InterruptedException end) {
                    return;
                }
            }
        }
    }

    static String follow(Client client, String[] words) throws Exception {
        switch (words[0]) {
            case "connect":
                return client.connect(Integer.parseInt(words[1]), words[2], words[3].equals("1"), words[4]) ? "1" : "0";
            case "subscribe":
                return Integer.toString(client.subscribe(words[1], Integer.parseInt(words[2])));
            case "publish":
                client.publish(words[1], Integer.parseInt(words[2]), words[3].equals("1"), words[4].getBytes());
                return "";
            case "blob":
                client.publish(words[1], 1, false, new byte[Integer.parseInt(words[2])]);
                return "";
            case "next":
                String found = messages.poll(WAIT_S, TimeUnit.SECONDS);
                if (found == null) throw new IllegalStateException("no message came");
                return found;
            case "waiting":
                return Integer.toString(messages.size());
            case "stream":
                Thread sender = new Thread(() -> stream(client, words[1], Integer.parseInt(words[2])));
                sender.setDaemon(true);
                sender.start();
                return "";
            case "acked":
                return Integer.toString(acked);
            case "end":
                client.end();
                return "";
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    public static void main(String[] arguments) throws Exception {
        Client client = switch (arguments[0]) {
            case "hivemq-5" -> new HiveMq5();
            case "hivemq-3" -> new HiveMq3();
            case "paho-5" -> new Paho5();
            default -> new Paho3();
        };
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            String answer;
            try {
                answer = "ok " + follow(client, line.split(" "));
            } catch (Exception error) {
                answer = "error " + error.toString().replace('\n', ' ');
            }
            System.out.println(answer);
        }
        System.exit(0);
    }
}
