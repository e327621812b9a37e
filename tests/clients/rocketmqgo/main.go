// The official Go client of RocketMQ as a process: understands the lines that ../rocketmq_driver.py understands.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

type fields = map[string]any

// A wish is one line from the test.
type wish struct {
	Do         string            `json:"do"`
	Topic      string            `json:"topic"`
	Topics     json.RawMessage   `json:"topics"`
	Body       string            `json:"body"`
	Times      int               `json:"times"`
	Tag        string            `json:"tag"`
	Keys       []string          `json:"keys"`
	Properties map[string]string `json:"properties"`
	Group      string            `json:"group"`
	AtS        int64             `json:"at_s"`
	Lite       json.RawMessage   `json:"lite"`
	Parent     string            `json:"parent"`
	Handle     string            `json:"handle"`
	ID         string            `json:"id"`
	Commit     bool              `json:"commit"`
	Priority   int32             `json:"priority"`
	Undecided  []string          `json:"undecided"`
	Sql        bool              `json:"sql"`
	WaitS      int               `json:"wait_s"`
	Count      int32             `json:"count"`
	InvisibleS *int              `json:"invisible_s"`
	Failing    map[string]int    `json:"failing"`
	SlowS      float64           `json:"slow_s"`
}

type stopper interface{ GracefulStop() error }

type driver struct {
	target, key, secret, namespace string

	lock         sync.Mutex
	begun, done  []fields
	checked      []string
	received     map[string]*rocketmq.MessageView
	transactions []rocketmq.Transaction
	producer     rocketmq.Producer
	simple       rocketmq.SimpleConsumer
	consumer     stopper
}

func text(value *string) string {
	if value == nil {
		return ""
	}
	return *value
}

func told(message *rocketmq.MessageView) fields {
	keys := append([]string{}, message.GetKeys()...)
	sort.Strings(keys)
	born := int64(0)
	if message.GetBornTimestamp() != nil {
		born = message.GetBornTimestamp().UnixMilli()
	}
	return fields{
		"topic": message.GetTopic(), "body": string(message.GetBody()), "id": message.GetMessageId(),
		"tag": text(message.GetTag()), "keys": keys, "properties": message.GetProperties(),
		"group": text(message.GetMessageGroup()), "attempt": message.GetDeliveryAttempt(), "born_ms": born,
		"born_host": text(message.GetBornHost()), "lite": message.GetLiteTopic(), "corrupted": false,
	}
}

func (d *driver) config(group string) *rocketmq.Config {
	return &rocketmq.Config{
		Endpoint: d.target, ConsumerGroup: group, NameSpace: d.namespace,
		Credentials: &credentials.SessionCredentials{AccessKey: d.key, AccessSecret: d.secret},
	}
}

func message(w wish) *rocketmq.Message {
	made := &rocketmq.Message{Topic: w.Topic, Body: []byte(strings.Repeat(w.Body, max(w.Times, 1)))}
	if w.Tag != "" {
		made.SetTag(w.Tag)
	}
	if len(w.Keys) > 0 {
		made.SetKeys(w.Keys...)
	}
	for name, value := range w.Properties {
		made.AddProperty(name, value)
	}
	if w.Group != "" {
		made.SetMessageGroup(w.Group)
	}
	if w.AtS > 0 {
		made.SetDelayTimestamp(time.Unix(w.AtS, 0))
	}
	if w.Priority > 0 {
		_ = made.SetPriority(w.Priority)
	}
	var lite string
	if json.Unmarshal(w.Lite, &lite) == nil && lite != "" {
		made.SetLiteTopic(lite)
	}
	return made
}

func subscriptions(w wish) map[string]*rocketmq.FilterExpression {
	topics := map[string]string{}
	_ = json.Unmarshal(w.Topics, &topics)
	found := map[string]*rocketmq.FilterExpression{}
	for topic, expression := range topics {
		kind := rocketmq.TAG
		if w.Sql {
			kind = rocketmq.SQL92
		}
		found[topic] = rocketmq.NewFilterExpressionWithType(expression, kind)
	}
	return found
}

func (d *driver) listener(w wish) rocketmq.MessageListener {
	d.begun, d.done = nil, nil
	failing := w.Failing
	return &rocketmq.FuncMessageListener{Consume: func(message *rocketmq.MessageView) rocketmq.ConsumerResult {
		found := told(message)
		d.lock.Lock()
		d.begun = append(d.begun, found)
		d.lock.Unlock()
		time.Sleep(time.Duration(w.SlowS * float64(time.Second)))
		d.lock.Lock()
		defer d.lock.Unlock()
		body := found["body"].(string)
		if failing[body] > 0 {
			failing[body]--
			return rocketmq.FAILURE
		}
		d.done = append(d.done, found)
		return rocketmq.SUCCESS
	}}
}

func (d *driver) serve(w wish) (fields, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	switch w.Do {
	case "producer":
		var topics []string
		_ = json.Unmarshal(w.Topics, &topics)
		check := func(message *rocketmq.MessageView) rocketmq.TransactionResolution {
			d.lock.Lock()
			defer d.lock.Unlock()
			body := string(message.GetBody())
			d.checked = append(d.checked, body)
			for _, each := range w.Undecided {
				if each == body {
					return rocketmq.UNKNOWN
				}
			}
			return rocketmq.COMMIT
		}
		made, err := rocketmq.NewProducer(d.config(""), rocketmq.WithTopics(topics...),
			rocketmq.WithTransactionChecker(&rocketmq.TransactionChecker{Check: check}))
		if err != nil {
			return nil, err
		}
		d.producer = made
		return fields{}, made.Start()
	case "send":
		receipts, err := d.producer.Send(ctx, message(w))
		if err != nil {
			return nil, err
		}
		return fields{"id": receipts[0].MessageID, "recall": receipts[0].RecallHandle}, nil
	case "recall":
		id, err := d.producer.Recall(ctx, w.Topic, w.Handle)
		return fields{"id": id}, err
	case "begin":
		transaction := d.producer.BeginTransaction()
		receipts, err := d.producer.SendWithTransaction(ctx, message(w), transaction)
		if err != nil {
			return nil, err
		}
		d.transactions = append(d.transactions, transaction)
		return fields{"id": receipts[0].MessageID}, nil
	case "end":
		last := len(d.transactions) - 1
		transaction := d.transactions[last]
		d.transactions = d.transactions[:last]
		if w.Commit {
			return fields{}, transaction.Commit()
		}
		return fields{}, transaction.RollBack()
	case "checked":
		d.lock.Lock()
		defer d.lock.Unlock()
		return fields{"bodies": append([]string{}, d.checked...)}, nil
	case "simple":
		wait := 5
		if w.WaitS > 0 {
			wait = w.WaitS
		}
		made, err := rocketmq.NewSimpleConsumer(d.config(w.Group),
			rocketmq.WithSimpleAwaitDuration(time.Duration(wait)*time.Second),
			rocketmq.WithSimpleSubscriptionExpressions(subscriptions(w)))
		if err != nil {
			return nil, err
		}
		if err := made.Start(); err != nil {
			return nil, err
		}
		d.simple, d.consumer = made, made
		return fields{}, nil
	case "receive":
		count, invisible := int32(32), 30
		if w.Count > 0 {
			count = w.Count
		}
		if w.InvisibleS != nil {
			invisible = *w.InvisibleS
		}
		found := []fields{}
		messages, err := d.simple.Receive(ctx, count, time.Duration(invisible)*time.Second)
		var status *rocketmq.ErrRpcStatus
		if errors.As(err, &status) && status.Code == 40401 { // There is no message, which this client takes for an error.
			err = nil
		}
		for _, each := range messages {
			d.received[each.GetMessageId()] = each
			found = append(found, told(each))
		}
		return fields{"messages": found}, err
	case "ack":
		return fields{}, d.simple.Ack(ctx, d.received[w.ID])
	case "change":
		return fields{}, d.simple.ChangeInvisibleDuration(d.received[w.ID], time.Duration(*w.InvisibleS)*time.Second)
	case "push":
		made, err := rocketmq.NewPushConsumer(d.config(w.Group), rocketmq.WithPushAwaitDuration(5*time.Second),
			rocketmq.WithPushSubscriptionExpressions(subscriptions(w)), rocketmq.WithPushMessageListener(d.listener(w)))
		if err != nil {
			return nil, err
		}
		if err := made.Start(); err != nil {
			return nil, err
		}
		d.consumer = made
		return fields{}, nil
	case "pushed":
		d.lock.Lock()
		defer d.lock.Unlock()
		return fields{"begun": append([]fields{}, d.begun...), "done": append([]fields{}, d.done...)}, nil
	case "lite_push":
		var topics []string
		_ = json.Unmarshal(w.Lite, &topics)
		made, err := rocketmq.NewLitePushConsumer(d.config(w.Group),
			rocketmq.NewLitePushConsumerConfig(w.Parent, 30*time.Second),
			rocketmq.WithPushAwaitDuration(5*time.Second), rocketmq.WithPushMessageListener(d.listener(w)))
		if err != nil {
			return nil, err
		}
		if err := made.Start(); err != nil {
			return nil, err
		}
		d.consumer = made
		for _, topic := range topics {
			if err := made.SubscribeLite(topic); err != nil {
				return nil, err
			}
		}
		return fields{}, nil
	case "stop":
		if d.consumer != nil {
			_ = d.consumer.GracefulStop()
		}
		if d.producer != nil {
			_ = d.producer.GracefulStop()
		}
		d.consumer, d.simple, d.producer = nil, nil, nil
		return fields{}, nil
	}
	return nil, fmt.Errorf("unknown: %s", w.Do)
}

func main() {
	out := os.Stdout
	os.Stdout = os.Stderr
	rocketmq.ResetLogger()
	rocketmq.EnableSsl = os.Getenv("DRIVER_TLS") != "0"
	d := &driver{target: os.Args[1], key: os.Args[2], secret: os.Args[3], namespace: os.Args[4],
		received: map[string]*rocketmq.MessageView{}}
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var w wish
		var answer fields
		if err = json.Unmarshal(line, &w); err == nil {
			answer, err = d.serve(w)
		}
		if err != nil {
			code := int32(0)
			var status *rocketmq.ErrRpcStatus
			if errors.As(err, &status) {
				code = status.Code
			}
			answer = fields{"error": err.Error(), "code": code}
		}
		written, _ := json.Marshal(answer)
		_, _ = out.Write(append(written, '\n'))
	}
}
