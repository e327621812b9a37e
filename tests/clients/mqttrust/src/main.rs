// rumqttc, which does what the lines on stdin say and answers each with one line. The first argument names the version: rust-3 or
// rust-5. tests/clients/mqtt_processes.py drives this, and says what the lines mean.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::{mpsc, Mutex};
use tokio::time::{sleep, timeout};

const WAIT: Duration = Duration::from_secs(20);
const PACKET_BYTES: usize = 4 << 20;

/// What the event loop of a connection has seen.
enum Seen {
    Connected(bool),
    Subscribed(u8),
    Published,
    Message(String),
}

#[derive(Clone)]
enum Client {
    Older(rumqttc::AsyncClient),
    Newer(rumqttc::v5::AsyncClient),
}

fn shown(topic: &[u8], qos: u8, retain: bool, body: &[u8]) -> String {
    let text = if body.len() > 1000 { format!("#{}", body.len()) } else { String::from_utf8_lossy(body).to_string() };
    let name = if topic.is_empty() { "-".into() } else { String::from_utf8_lossy(topic).to_string() };
    format!("{} {} {} {}", name, qos, retain as u8, text)
}

fn qos_3(level: u8) -> rumqttc::QoS {
    [rumqttc::QoS::AtMostOnce, rumqttc::QoS::AtLeastOnce, rumqttc::QoS::ExactlyOnce][level as usize]
}

fn qos_5(level: u8) -> rumqttc::v5::mqttbytes::QoS {
    use rumqttc::v5::mqttbytes::QoS;
    [QoS::AtMostOnce, QoS::AtLeastOnce, QoS::ExactlyOnce][level as usize]
}

fn connect_3(port: u16, id: &str, clean: bool, will: &str, tell: mpsc::UnboundedSender<Seen>) -> Client {
    use rumqttc::{Event, Packet, SubscribeReasonCode};
    let mut options = rumqttc::MqttOptions::new(id, "127.0.0.1", port);
    options.set_clean_session(clean).set_max_packet_size(PACKET_BYTES, PACKET_BYTES);
    if will != "-" {
        options.set_last_will(rumqttc::LastWill::new(will, "gone", qos_3(1), false));
    }
    let (client, mut events) = rumqttc::AsyncClient::new(options, 1000);
    tokio::spawn(async move {
        loop {
            let seen = match events.poll().await {
                Ok(Event::Incoming(Packet::ConnAck(found))) => Seen::Connected(found.session_present),
                Ok(Event::Incoming(Packet::SubAck(found))) => Seen::Subscribed(match found.return_codes[0] {
                    SubscribeReasonCode::Success(granted) => granted as u8,
                    SubscribeReasonCode::Failure => 0x80,
                }),
                Ok(Event::Incoming(Packet::PubAck(_) | Packet::PubComp(_))) => Seen::Published,
                Ok(Event::Outgoing(rumqttc::Outgoing::Publish(0))) => Seen::Published, // QoS 0 has no packet id.
                Ok(Event::Incoming(Packet::Publish(found))) => {
                    Seen::Message(shown(found.topic.as_bytes(), found.qos as u8, found.retain, &found.payload))
                }
                Ok(_) => continue,
                Err(_) => {
                    sleep(Duration::from_millis(50)).await; // The next poll connects again.
                    continue;
                }
            };
            if tell.send(seen).is_err() {
                return;
            }
        }
    });
    Client::Older(client)
}

fn connect_5(port: u16, id: &str, clean: bool, will: &str, tell: mpsc::UnboundedSender<Seen>) -> Client {
    use rumqttc::v5::mqttbytes::v5::{ConnectProperties, LastWill, Packet, SubscribeReasonCode};
    use rumqttc::v5::{ConnectionError, Event, StateError};
    let mut options = rumqttc::v5::MqttOptions::new(id, "127.0.0.1", port);
    let mut about = ConnectProperties::new();
    about.session_expiry_interval = Some(if clean { 0 } else { 60 });
    about.topic_alias_max = Some(10);
    about.max_packet_size = Some(PACKET_BYTES as u32);
    options.set_clean_start(clean).set_connect_properties(about);
    if will != "-" {
        options.set_last_will(LastWill::new(will, "gone", qos_5(1), false, None));
    }
    let (client, mut events) = rumqttc::v5::AsyncClient::new(options, 1000);
    tokio::spawn(async move {
        loop {
            let seen = match events.poll().await {
                Ok(Event::Incoming(Packet::ConnAck(found))) => Seen::Connected(found.session_present),
                Ok(Event::Incoming(Packet::SubAck(found))) => Seen::Subscribed(match &found.return_codes[0] {
                    SubscribeReasonCode::Success(granted) => *granted as u8,
                    _ => 0x80,
                }),
                Ok(Event::Incoming(Packet::PubAck(_) | Packet::PubComp(_))) => Seen::Published,
                Ok(Event::Outgoing(rumqttc::Outgoing::Publish(0))) => Seen::Published, // QoS 0 has no packet id.
                Ok(Event::Incoming(Packet::Publish(found))) => {
                    Seen::Message(shown(&found.topic, found.qos as u8, found.retain, &found.payload))
                }
                Err(ConnectionError::MqttState(StateError::SubFail { reason })) => Seen::Subscribed(match reason {
                    SubscribeReasonCode::TopicFilterInvalid => 0x8F,
                    _ => 0x80,
                }),
                Ok(_) => continue,
                Err(_) => {
                    sleep(Duration::from_millis(50)).await; // The next poll connects again.
                    continue;
                }
            };
            if tell.send(seen).is_err() {
                return;
            }
        }
    });
    Client::Newer(client)
}

/// One connection, and what came of it by kind. Publishes go out one after the other.
struct Connection {
    client: Client,
    connected: Mutex<mpsc::UnboundedReceiver<bool>>,
    subscribed: Mutex<mpsc::UnboundedReceiver<u8>>,
    published: Mutex<mpsc::UnboundedReceiver<()>>,
    messages: Mutex<mpsc::UnboundedReceiver<String>>,
    acked: AtomicU64,
}

async fn next<T>(queue: &Mutex<mpsc::UnboundedReceiver<T>>) -> Result<T, String> {
    timeout(WAIT, queue.lock().await.recv()).await.map_err(|_| "nothing came")?.ok_or("the connection has ended".into())
}

impl Connection {
    fn open(is_5: bool, port: u16, id: &str, clean: bool, will: &str) -> Arc<Connection> {
        let (tell, mut seen) = mpsc::unbounded_channel();
        let client = if is_5 { connect_5(port, id, clean, will, tell) } else { connect_3(port, id, clean, will, tell) };
        let (connected_in, connected) = mpsc::unbounded_channel();
        let (subscribed_in, subscribed) = mpsc::unbounded_channel();
        let (published_in, published) = mpsc::unbounded_channel();
        let (messages_in, messages) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(each) = seen.recv().await {
                let _ = match each {
                    Seen::Connected(present) => connected_in.send(present).is_ok(),
                    Seen::Subscribed(code) => subscribed_in.send(code).is_ok(),
                    Seen::Published => published_in.send(()).is_ok(),
                    Seen::Message(found) => messages_in.send(found).is_ok(),
                };
            }
        });
        Arc::new(Connection {
            client,
            connected: Mutex::new(connected),
            subscribed: Mutex::new(subscribed),
            published: Mutex::new(published),
            messages: Mutex::new(messages),
            acked: AtomicU64::new(0),
        })
    }

    async fn publish(&self, topic: &str, qos: u8, retain: bool, body: Vec<u8>) -> Result<(), String> {
        match &self.client {
            Client::Older(client) => client.publish(topic, qos_3(qos), retain, body).await.map_err(|e| e.to_string())?,
            Client::Newer(client) => client.publish(topic, qos_5(qos), retain, body).await.map_err(|e| e.to_string())?,
        }
        next(&self.published).await
    }

    async fn subscribe(&self, filter: &str, qos: u8) -> Result<u8, String> {
        match &self.client {
            Client::Older(client) => client.subscribe(filter, qos_3(qos)).await.map_err(|e| e.to_string())?,
            Client::Newer(client) => client.subscribe(filter, qos_5(qos)).await.map_err(|e| e.to_string())?,
        }
        next(&self.subscribed).await
    }

    async fn end(&self) -> Result<(), String> {
        match &self.client {
            Client::Older(client) => client.disconnect().await.map_err(|e| e.to_string()),
            Client::Newer(client) => client.disconnect().await.map_err(|e| e.to_string()),
        }
    }
}

async fn follow(held: &mut Option<Arc<Connection>>, is_5: bool, words: &[&str]) -> Result<String, String> {
    let number = |at: usize| words[at].parse::<u64>().unwrap_or(0);
    if words[0] == "connect" {
        let made = Connection::open(is_5, number(1) as u16, words[2], words[3] == "1", words[4]);
        let present = next(&made.connected).await?;
        *held = Some(made);
        return Ok((present as u8).to_string());
    }
    let connection = held.clone().ok_or("not connected")?;
    match words[0] {
        "subscribe" => Ok(connection.subscribe(words[1], number(2) as u8).await?.to_string()),
        "publish" => {
            connection.publish(words[1], number(2) as u8, words[3] == "1", words[4].into()).await.map(|_| String::new())
        }
        "blob" => connection.publish(words[1], 1, false, vec![0; number(2) as usize]).await.map(|_| String::new()),
        "next" => next(&connection.messages).await,
        "waiting" => Ok(connection.messages.lock().await.len().to_string()),
        "stream" => {
            let (topic, count) = (words[1].to_string(), number(2));
            tokio::spawn(async move {
                for each in 0..count {
                    if connection.publish(&topic, 1, false, each.to_string().into()).await.is_err() {
                        return; // rumqttc sends again what is not acknowledged, so this is no lost connection.
                    }
                    connection.acked.fetch_add(1, Ordering::SeqCst);
                }
            });
            Ok(String::new())
        }
        "acked" => Ok(connection.acked.load(Ordering::SeqCst).to_string()),
        "end" => connection.end().await.map(|_| String::new()),
        _ => Err(format!("unknown command {}", words[0])),
    }
}

#[tokio::main(worker_threads = 2)]
async fn main() {
    let is_5 = std::env::args().nth(1).as_deref() == Some("rust-5");
    let mut held = None;
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let words: Vec<&str> = line.split(' ').collect();
        match follow(&mut held, is_5, &words).await {
            Ok(answer) => println!("ok {}", answer),
            Err(error) => println!("error {}", error.replace('\n', " ")),
        }
    }
}
