package main

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/gomodule/redigo/redis"
)

const address, patience = "127.0.0.1:6379", 350 * time.Millisecond

var run = fmt.Sprintf("%x", time.Now().Unix())

type Answer struct {
	Outcome   string `json:"outcome"`
	ID        string `json:"id"`
	UsedUnits int    `json:"used_units"`
}

// Charge charges a call against 9,500 units of any 24 hours. After an error do not send the call.
func Charge(script *redis.Script, project, method string, units int, job, region string) (answer Answer, err error) {
	random := make([]byte, 8)
	if _, err = rand.Read(random); err != nil {
		return answer, err
	}
	key, keys := fmt.Sprintf("%s-%x", run, random), "quota:{"+project+"}:ledger:"
	arguments := []interface{}{keys + "log", keys + "state", keys + "corrected",
		0, time.Now().UnixMilli(), "", key, units, "units", method, job, region, "units|*|*", 9500, units, 86400000}
	reply, err := ask(script, arguments)
	var refused redis.Error
	if err != nil && !errors.As(err, &refused) {
		reply, err = ask(script, arguments)
	}
	if err != nil {
		return answer, err
	}
	rest, err := redis.Scan(reply, &answer.Outcome, &answer.ID)
	if err == nil && len(rest) > 2 {
		_, err = redis.Scan(rest[2:], &answer.UsedUnits)
	}
	return answer, err
}

func ask(script *redis.Script, arguments []interface{}) ([]interface{}, error) {
	conn, err := redis.Dial("tcp", address, redis.DialConnectTimeout(patience),
		redis.DialReadTimeout(patience), redis.DialWriteTimeout(patience))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return redis.Values(script.Do(conn, arguments...))
}

func main() {
	source, err := os.ReadFile("scripts/charge.lua")
	if err != nil {
		log.Fatal(err)
	}
	answer, err := Charge(redis.NewScript(3, string(source)), "demo", "search.list", 100, "nightly", "DE")
	if err != nil {
		log.Fatal(err)
	}
	json.NewEncoder(os.Stdout).Encode(answer)
}
