// The official Rust client of RocketMQ as a process: understands the lines that ../rocketmq_driver.py understands, as far as this
// client can do what they say. It has neither push consumers nor lite topics, and can neither recall nor return a message.
use std::collections::HashMap;
use std::future::Future;
use std::io::Write;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::error::ClientError;
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{Message, MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{json, Value};
use tokio::io::{AsyncBufReadExt, BufReader};

type Ending = Pin<Box<dyn Future<Output = Result<(), ClientError>>>>;
type End = Box<dyn FnOnce(bool) -> Ending>;

struct Failure {
    error: String,
    code: String,
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let code = error.context().iter().find(|(name, _)| *name == "code").map(|(_, code)| code.clone());
        Failure { error: error.to_string(), code: code.unwrap_or_default() }
    }
}

#[derive(Default)]
struct Driver {
    target: String,
    key: String,
    secret: String,
    producer: Option<Producer>,
    consumer: Option<SimpleConsumer>,
    filters: Vec<(String, FilterType, String)>,
    received: HashMap<String, MessageView>,
    transactions: Vec<End>,
    checked: Arc<Mutex<Vec<String>>>,
}

fn text(wish: &Value, name: &str) -> String {
    wish[name].as_str().unwrap_or_default().to_string()
}

fn texts(found: &Value) -> Vec<String> {
    found.as_array().into_iter().flatten().filter_map(|each| each.as_str().map(String::from)).collect()
}

fn body_of(message: &MessageView) -> String {
    String::from_utf8_lossy(message.body()).to_string()
}

fn told(message: &MessageView) -> Value {
    let mut keys = message.keys().to_vec();
    keys.sort();
    json!({
        "topic": message.topic(), "body": body_of(message), "id": message.message_id(), "tag": message.tag().unwrap_or_default(),
        "keys": keys, "properties": message.properties(), "group": message.message_group().unwrap_or_default(),
        "attempt": message.delivery_attempt(), "born_ms": message.born_timestamp() * 1000, "born_host": message.born_host(),
        "lite": "", "corrupted": false,
    })
}

fn message(wish: &Value) -> Result<impl Message, ClientError> {
    let body = text(wish, "body").repeat(wish["times"].as_u64().unwrap_or(1) as usize);
    let mut made = MessageBuilder::builder().set_topic(text(wish, "topic")).set_body(body.into_bytes());
    if let Some(tag) = wish["tag"].as_str() {
        made = made.set_tag(tag);
    }
    if wish["keys"].is_array() {
        made = made.set_keys(texts(&wish["keys"]));
    }
    if let Some(properties) = wish["properties"].as_object() {
        let all = properties.iter().map(|(name, value)| (name.clone(), value.as_str().unwrap_or_default().to_string()));
        made = made.set_properties(all.collect::<HashMap<String, String>>());
    }
    if let Some(group) = wish["group"].as_str() {
        made = made.set_message_group(group);
    }
    if let Some(at_s) = wish["at_s"].as_i64() {
        made = made.set_delivery_timestamp(at_s);
    }
    if wish["do"] == "begin" {
        made = made.enable_transaction();
    }
    made.build()
}

impl Driver {
    fn option(&self) -> ClientOption {
        let mut option = ClientOption::default();
        option.set_access_url(self.target.clone());
        option.set_access_key(self.key.clone());
        option.set_secret_key(self.secret.clone());
        option
    }

    async fn serve(&mut self, wish: Value) -> Result<Value, Failure> {
        match wish["do"].as_str().unwrap_or_default() {
            "producer" => {
                let mut option = ProducerOption::default();
                option.set_topics(texts(&wish["topics"]));
                let (undecided, checked) = (texts(&wish["undecided"]), self.checked.clone());
                let check = move |_id: String, message: MessageView| {
                    let body = body_of(&message);
                    checked.lock().unwrap().push(body.clone());
                    if undecided.contains(&body) { TransactionResolution::UNKNOWN } else { TransactionResolution::COMMIT }
                };
                let mut made = Producer::new_transaction_producer(option, self.option(), Box::new(check))?;
                made.start().await?;
                self.producer = Some(made);
                Ok(json!({}))
            }
            "send" => {
                let receipt = self.producer.as_ref().expect("a producer").send(message(&wish)?).await?;
                Ok(json!({"id": receipt.message_id(), "recall": ""}))
            }
            "begin" => {
                let producer = self.producer.as_ref().expect("a producer");
                let transaction = producer.send_transaction_message(message(&wish)?).await?;
                let id = transaction.message_id().to_string();
                self.transactions.push(Box::new(move |commit| -> Ending {
                    Box::pin(async move { if commit { transaction.commit().await } else { transaction.rollback().await } })
                }));
                Ok(json!({"id": id}))
            }
            "end" => {
                let end = self.transactions.pop().expect("a transaction");
                end(wish["commit"] == true).await?;
                Ok(json!({}))
            }
            "checked" => Ok(json!({"bodies": *self.checked.lock().unwrap()})),
            "simple" => {
                let topics = wish["topics"].as_object().expect("topics");
                let kind = || if wish["sql"] == true { FilterType::Sql } else { FilterType::Tag };
                self.filters = topics.iter().map(|(topic, by)| (topic.clone(), kind(), by.as_str().unwrap().into())).collect();
                let mut option = SimpleConsumerOption::default();
                option.set_consumer_group(text(&wish, "group"));
                option.set_topics(topics.keys().cloned().collect());
                let mut client = self.option();
                client.set_long_polling_timeout(Duration::from_secs(wish["wait_s"].as_u64().unwrap_or(8)));
                let mut made = SimpleConsumer::new(option, client)?;
                made.start().await?;
                self.consumer = Some(made);
                Ok(json!({}))
            }
            "receive" => {
                let consumer = self.consumer.as_ref().expect("a consumer");
                let count = wish["count"].as_i64().unwrap_or(32) as i32;
                let invisible = Duration::from_secs(wish["invisible_s"].as_u64().unwrap_or(30));
                let mut found = Vec::new();
                for (topic, kind, by) in &self.filters {
                    let kind = if matches!(kind, FilterType::Sql) { FilterType::Sql } else { FilterType::Tag };
                    for message in consumer.receive_with(topic, &FilterExpression::new(kind, by.clone()), count, invisible).await? {
                        found.push(told(&message));
                        self.received.insert(message.message_id().to_string(), message);
                    }
                }
                Ok(json!({"messages": found}))
            }
            "ack" => {
                let message = self.received.get(&text(&wish, "id")).expect("a message that was received");
                self.consumer.as_ref().expect("a consumer").ack(message).await?;
                Ok(json!({}))
            }
            "stop" => {
                if let Some(consumer) = self.consumer.take() {
                    consumer.shutdown().await?;
                }
                if let Some(producer) = self.producer.take() {
                    producer.shutdown().await?;
                }
                Ok(json!({}))
            }
            other => Err(Failure { error: format!("this client has no {other}"), code: String::new() }),
        }
    }
}

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().unwrap_or_default();
    let mut driver = Driver { target: next(), key: next(), secret: next(), ..Driver::default() };
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let wish: Value = serde_json::from_str(&line).expect("a line of JSON");
        let answer = match driver.serve(wish).await {
            Ok(answer) => answer,
            Err(failure) => json!({"error": failure.error, "code": failure.code}),
        };
        let mut out = std::io::stdout();
        writeln!(out, "{answer}").and_then(|_| out.flush()).expect("stdout is open");
    }
}
