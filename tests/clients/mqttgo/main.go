// Clients for MQTT in Go that do what the lines on stdin say, and answer each with one line. The first argument names the client:
// go-3 (paho.mqtt.golang) or go-5 (paho.golang). tests/clients/mqtt_processes.py drives this, and says what the lines mean.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/eclipse/paho.golang/autopaho"
	"github.com/eclipse/paho.golang/paho"
	mqtt "github.com/eclipse/paho.mqtt.golang"
)

const wait = 20 * time.Second

var (
	messages = make(chan string, 100_000)
	acked    atomic.Int64
)

type client interface {
	connect(port, id string, clean bool, will string) (bool, error)
	subscribe(filter string, qos byte) (int, error)
	publish(topic string, qos byte, retain bool, body []byte) error
	end() error
}

func got(topic string, qos byte, retain bool, body []byte) {
	shown := string(body)
	if len(body) > 1000 {
		shown = fmt.Sprintf("#%d", len(body))
	}
	if topic == "" {
		topic = "-"
	}
	retained := 0
	if retain {
		retained = 1
	}
	messages <- fmt.Sprintf("%s %d %d %s", topic, qos, retained, shown)
}

// --- paho.mqtt.golang

type older struct{ made mqtt.Client }

func done(token mqtt.Token) error {
	if !token.WaitTimeout(wait) {
		return errors.New("no answer came")
	}
	return token.Error()
}

func (c *older) connect(port, id string, clean bool, will string) (bool, error) {
	options := mqtt.NewClientOptions().AddBroker("tcp://127.0.0.1:" + port).SetClientID(id).SetCleanSession(clean).
		SetAutoReconnect(true).SetMaxReconnectInterval(200 * time.Millisecond).SetOrderMatters(true)
	if will != "-" {
		options.SetWill(will, "gone", 1, false)
	}
	options.SetDefaultPublishHandler(func(_ mqtt.Client, found mqtt.Message) {
		got(found.Topic(), found.Qos(), found.Retained(), found.Payload())
	})
	c.made = mqtt.NewClient(options)
	token := c.made.Connect()
	err := done(token)
	return token.(*mqtt.ConnectToken).SessionPresent(), err
}

func (c *older) subscribe(filter string, qos byte) (int, error) {
	token := c.made.Subscribe(filter, qos, nil)
	err := done(token)
	for _, code := range token.(*mqtt.SubscribeToken).Result() { // The key of a shared subscription is its filter alone.
		return int(code), nil
	}
	return 0, err
}

func (c *older) publish(topic string, qos byte, retain bool, body []byte) error {
	return done(c.made.Publish(topic, qos, retain, body))
}

func (c *older) end() error {
	c.made.Disconnect(100)
	return nil
}

// --- paho.golang

type newer struct{ made *autopaho.ConnectionManager }

func (c *newer) connect(port, id string, clean bool, will string) (bool, error) {
	server, _ := url.Parse("mqtt://127.0.0.1:" + port)
	expiry := uint32(60)
	if clean {
		expiry = 0
	}
	present := make(chan bool, 100)
	config := autopaho.ClientConfig{
		ServerUrls:                    []*url.URL{server},
		KeepAlive:                     30,
		CleanStartOnInitialConnection: clean,
		SessionExpiryInterval:         expiry,
		ReconnectBackoff:              func(int) time.Duration { return 100 * time.Millisecond },
		OnConnectionUp: func(_ *autopaho.ConnectionManager, answer *paho.Connack) {
			select {
			case present <- answer.SessionPresent:
			default:
			}
		},
		ConnectPacketBuilder: func(packet *paho.Connect, _ *url.URL) (*paho.Connect, error) {
			most := uint16(10)
			if packet.Properties == nil {
				packet.Properties = &paho.ConnectProperties{}
			}
			packet.Properties.TopicAliasMaximum = &most
			return packet, nil
		},
		ClientConfig: paho.ClientConfig{
			ClientID: id,
			OnPublishReceived: []func(paho.PublishReceived) (bool, error){func(found paho.PublishReceived) (bool, error) {
				got(found.Packet.Topic, found.Packet.QoS, found.Packet.Retain, found.Packet.Payload)
				return true, nil
			}},
		},
	}
	if will != "-" {
		config.WillMessage = &paho.WillMessage{Topic: will, Payload: []byte("gone"), QoS: 1}
	}
	made, err := autopaho.NewConnection(context.Background(), config)
	if err != nil {
		return false, err
	}
	c.made = made
	select {
	case was := <-present:
		return was, nil
	case <-time.After(wait):
		return false, errors.New("no answer came")
	}
}

func (c *newer) subscribe(filter string, qos byte) (int, error) {
	ends, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	answer, err := c.made.Subscribe(ends, &paho.Subscribe{Subscriptions: []paho.SubscribeOptions{{Topic: filter, QoS: qos}}})
	if answer == nil || len(answer.Reasons) == 0 {
		return 0, err
	}
	return int(answer.Reasons[0]), nil
}

func (c *newer) publish(topic string, qos byte, retain bool, body []byte) error {
	ends, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	_, err := c.made.Publish(ends, &paho.Publish{Topic: topic, QoS: qos, Retain: retain, Payload: body})
	return err
}

func (c *newer) end() error {
	return c.made.Disconnect(context.Background())
}

// --- commands

func stream(c client, topic string, count int64) {
	for acked.Load() < count {
		if c.publish(topic, 1, false, []byte(strconv.FormatInt(acked.Load(), 10))) == nil {
			acked.Add(1)
		} else { // The connection is lost: the client connects again by itself.
			time.Sleep(20 * time.Millisecond)
		}
	}
}

func follow(c client, words []string) (string, error) {
	number := func(at int) int {
		found, _ := strconv.Atoi(words[at])
		return found
	}
	switch words[0] {
	case "connect":
		present, err := c.connect(words[1], words[2], words[3] == "1", words[4])
		if present {
			return "1", err
		}
		return "0", err
	case "subscribe":
		code, err := c.subscribe(words[1], byte(number(2)))
		return strconv.Itoa(code), err
	case "publish":
		return "", c.publish(words[1], byte(number(2)), words[3] == "1", []byte(words[4]))
	case "blob":
		return "", c.publish(words[1], 1, false, make([]byte, number(2)))
	case "next":
		select {
		case found := <-messages:
			return found, nil
		case <-time.After(wait):
			return "", errors.New("no message came")
		}
	case "waiting":
		return strconv.Itoa(len(messages)), nil
	case "stream":
		go stream(c, words[1], int64(number(2)))
		return "", nil
	case "acked":
		return strconv.FormatInt(acked.Load(), 10), nil
	case "end":
		return "", c.end()
	}
	return "", errors.New("unknown command " + words[0])
}

func main() {
	var c client = &older{}
	if os.Args[1] == "go-5" {
		c = &newer{}
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		answer, err := follow(c, strings.Split(lines.Text(), " "))
		if err != nil {
			fmt.Println("error", err)
		} else {
			fmt.Println("ok", answer)
		}
	}
}
